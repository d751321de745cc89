// The one entry of libdmuon_cuda.so. The loader (loader.h) looks it up by name; nothing else of the library is visible.
#ifndef DMUON_KERNELS_CUDA_MODULE_H_
#define DMUON_KERNELS_CUDA_MODULE_H_

#include <cstddef>
#include <cstdint>

namespace dmuon::kernels {
class Backend;
}

namespace dmuon::cuda {

// Raised whenever backend.h or newton_schulz.h change what the two sides share.
constexpr uint32_t kModuleAbi = 6;
constexpr char kModuleEntry[] = "dmuon_cuda_open";
constexpr char kModuleFile[] = "libdmuon_cuda.so";

// A backend on the device of this ordinal, owned by the caller; or null, and the absl::StatusCode and the reason.
using ModuleEntry = kernels::Backend* (*)(uint32_t abi, int device, int* code, char* why,
                                          size_t why_bytes);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_MODULE_H_
