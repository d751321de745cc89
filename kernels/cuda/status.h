// The CUDA runtime's error codes as absl::Status. The message says what was being done, then the runtime's own name of it.
#ifndef DMUON_KERNELS_CUDA_STATUS_H_
#define DMUON_KERNELS_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dmuon::cuda {

// RESOURCE_EXHAUSTED: out of memory. UNAVAILABLE: no driver, no device, or a device lost to others.
// INTERNAL: everything else; after a failed kernel the device stays unusable for this process.
absl::Status ToStatus(cudaError_t error, absl::string_view doing);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_STATUS_H_
