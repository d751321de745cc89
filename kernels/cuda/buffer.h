// Owner of device memory: moves, never copies, frees on its device. For what is made outside a step.
#ifndef DMUON_KERNELS_CUDA_BUFFER_H_
#define DMUON_KERNELS_CUDA_BUFFER_H_

#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"

namespace dmuon::cuda {

class Buffer {
 public:
  Buffer() = default;
  // Zeroed, aligned to 256 bytes. RESOURCE_EXHAUSTED names the bytes needed and the bytes free.
  static absl::StatusOr<Buffer> Allocate(int device, size_t bytes);

  Buffer(Buffer&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), device_(other.device_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(device_, other.device_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  void* get() const { return memory_; }
  template <typename T>
  T* as(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_) + byte_offset);
  }
  void* Release() { return std::exchange(memory_, nullptr); }

 private:
  Buffer(void* memory, int device) : memory_(memory), device_(device) {}
  void* memory_ = nullptr;
  int device_ = 0;
};

// Frees what Release gave away. Waits for the device; a failure is logged.
void FreeDeviceMemory(int device, void* memory);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_BUFFER_H_
