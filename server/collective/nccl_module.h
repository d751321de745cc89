// The one entry of libdmuon_nccl.so. LoadDeviceCommunicators looks it up by name; nothing else of the library is visible.
#ifndef DMUON_SERVER_COLLECTIVE_NCCL_MODULE_H_
#define DMUON_SERVER_COLLECTIVE_NCCL_MODULE_H_

#include <cstdint>

namespace dmuon::server {

class DeviceCommunicators;

// Raised whenever device_communicator.h or kernels/cuda/stream.h change what the two sides share.
constexpr uint32_t kNcclModuleAbi = 2;
constexpr char kNcclModuleEntry[] = "dmuon_nccl_open";
constexpr char kNcclModuleFile[] = "libdmuon_nccl.so";

// Null: of another build.
using NcclModuleEntry = DeviceCommunicators* (*)(uint32_t abi);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_NCCL_MODULE_H_
