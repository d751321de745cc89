// One arena in this process's device memory, for the daemon to map.
#ifndef DMUON_CLIENT_DEVICE_ARENA_H_
#define DMUON_CLIENT_DEVICE_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cuda_runtime.h"

namespace dmuon::client {

// Owns an allocation of its own: never a part of a framework's. Destroying it does not free it: the daemon may have it
// mapped, and freeing it then is undefined. Free does, once the daemon has let go.
class DeviceArena {
 public:
  // Zeroed. `name` is for messages. RESOURCE_EXHAUSTED names the bytes; FAILED_PRECONDITION: memory that other processes
  // cannot map, and why that may be.
  static absl::StatusOr<DeviceArena> Allocate(const CudaRuntime& cuda, int device, uint64_t bytes,
                                              absl::string_view name);

  DeviceArena() = default;
  DeviceArena(DeviceArena&& other) noexcept { *this = std::move(other); }
  DeviceArena& operator=(DeviceArena&& other) noexcept {
    std::swap(cuda_, other.cuda_);
    std::swap(device_, other.device_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(handle_, other.handle_);
    return *this;
  }

  std::byte* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  const std::string& handle() const { return handle_; }

  // Waits for the copy. For set-up and tests; not in a step.
  absl::Status CopyIn(uint64_t offset, const void* host, size_t bytes) const;
  absl::Status CopyOut(uint64_t offset, void* host, size_t bytes) const;

  // Idempotent.
  void Free();

 private:
  // Runs `enqueue` with a stream of its own and waits: the default one would wait for the program's work.
  absl::Status OnStream(absl::string_view doing,
                        absl::FunctionRef<int(void* stream)> enqueue) const;

  const CudaRuntime* cuda_ = nullptr;
  int device_ = 0;
  std::byte* base_ = nullptr;
  uint64_t bytes_ = 0;
  std::string handle_;
};

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_DEVICE_ARENA_H_
