#include "kernels/cuda/buffer.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {

absl::StatusOr<Buffer> Buffer::Allocate(int device, size_t bytes) {
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(device), "selecting the device"));
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes == 0 ? 1 : bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();  // not sticky; leave nothing behind for the next launch to find
    size_t free = 0;
    size_t total = 0;
    (void)cudaMemGetInfo(&free, &total);
    return absl::ResourceExhaustedError(
        absl::StrCat("device memory: needed ", bytes, " bytes, free ", free, " of ", total));
  }
  RETURN_IF_ERROR(ToStatus(error, absl::StrCat("allocating ", bytes, " bytes")));
  Buffer buffer(memory, device);
  // cudaMemset would run on the default stream, and so wait for other threads' work.
  cudaStream_t stream = nullptr;
  RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream"));
  cudaError_t zeroed = cudaMemsetAsync(memory, 0, bytes, stream);
  if (zeroed == cudaSuccess) zeroed = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  RETURN_IF_ERROR(ToStatus(zeroed, "zeroing new memory"));
  return buffer;
}

Buffer::~Buffer() {
  if (memory_ != nullptr) FreeDeviceMemory(device_, memory_);
}

void FreeDeviceMemory(int device, void* memory) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaFree(memory);
  // At process end the driver may be gone before us; nothing is left to free then.
  if (error != cudaSuccess && error != cudaErrorCudartUnloading) {
    Log(LogLevel::kWarning, "device_memory_not_freed",
        {{"reason", ToStatus(error, "cudaFree").message()}});
  }
}

}  // namespace dmuon::cuda
