// What trainer and daemon must say alike of a GPU that both use, each as its own CUDA runtime shows it.
#ifndef DMUON_BASE_GPU_H_
#define DMUON_BASE_GPU_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dmuon {

// "GPU-" or "MIG-", then the 16 bytes of the id as the driver's tools print them. A MIG instance is known by the name of its
// product, and has an id of its own.
std::string GpuName(const unsigned char* uuid, absl::string_view product);
bool IsMig(absl::string_view name);

// Attributes of a device that can be asked for without a context on it; numbers of cudaDeviceAttr and cudaComputeMode, which
// are the same in all releases.
inline constexpr int kComputeModeAttribute = 20;
inline constexpr int kIpcAttribute = 125;  // CUDA's own test for memory of other processes
enum class ComputeMode {
  kDefault = 0,
  kExclusiveThread = 1,
  kProhibited = 2,
  kExclusiveProcess = 3
};

struct GpuSharing {
  ComputeMode mode = ComputeMode::kDefault;
  bool ipc = true;
};

// FAILED_PRECONDITION: what keeps two processes from working on this GPU and sharing its memory, and what to do.
absl::Status CheckShareable(const std::string& name, const GpuSharing& sharing);

// `failed`, of a device that is there and could not be opened, with what its mode has to do with it. Of a mode that lets nobody
// in, CUDA's documents name two errors.
absl::Status ExplainNotOpened(const absl::Status& failed, ComputeMode mode);

// Whether this process goes through the server of MPS. CUDA decides that when it is first initialised, and so does this when
// it is first asked.
bool UsesMps();

// Two kernels in one machine. `release`: /proc/sys/kernel/osrelease.
bool IsWsl(absl::string_view release);

}  // namespace dmuon

#endif  // DMUON_BASE_GPU_H_
