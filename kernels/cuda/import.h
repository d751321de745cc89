// Memory of another process's cudaMalloc, mapped here by its legacy IPC handle.
#ifndef DMUON_KERNELS_CUDA_IMPORT_H_
#define DMUON_KERNELS_CUDA_IMPORT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/ops/backend.h"

namespace dmuon::cuda {

// As Backend::Import, on the device of this ordinal and name.
absl::StatusOr<std::unique_ptr<kernels::ImportedMemory>> ImportMemory(
    int device, const std::string& name, const kernels::DeviceVersions& ours,
    const kernels::MemoryHandle& handle);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_IMPORT_H_
