#include "kernels/cuda/status.h"

#include "absl/strings/str_cat.h"

namespace dmuon::cuda {

absl::Status ToStatus(cudaError_t error, absl::string_view doing) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // the thread's next launch would find it and take it for its own
  const std::string message =
      absl::StrCat(doing, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation: return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch: return absl::UnavailableError(message);
    default: return absl::InternalError(message);
  }
}

}  // namespace dmuon::cuda
