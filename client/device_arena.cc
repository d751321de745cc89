#include "client/device_arena.h"

#include "absl/strings/str_cat.h"
#include "base/checked_math.h"
#include "base/status_macros.h"

namespace dmuon::client {
namespace {

constexpr uint64_t kGranularity =
    2 << 20;  // the driver's own: a smaller allocation would share its page with others
constexpr unsigned kNonBlocking = 1;
constexpr int kHostToDevice = 1, kDeviceToHost = 2;
constexpr int kInvalidValue = 1, kNotSupported = 801;

absl::Status NotExportable(const CudaRuntime& cuda, int error, absl::string_view name) {
  const absl::Status status = cuda.Check(error, absl::StrCat(name, " arena: cudaIpcGetMemHandle"));
  if (error == kInvalidValue) {
    return absl::FailedPreconditionError(
        absl::StrCat(status.message(),
                     ": what cudaMalloc gave comes from a memory pool or from virtual memory "
                     "management, which has no such handles; is cudaMalloc replaced in this "
                     "process?"));
  }
  if (error == kNotSupported) {
    return absl::FailedPreconditionError(absl::StrCat(
        status.message(), ": this platform cannot share device memory between processes"));
  }
  return status;
}

}  // namespace

absl::StatusOr<DeviceArena> DeviceArena::Allocate(const CudaRuntime& cuda, int device,
                                                  uint64_t bytes, absl::string_view name) {
  const CudaDeviceScope scope(cuda, device);
  RETURN_IF_ERROR(scope.status());
  DeviceArena arena;
  arena.cuda_ = &cuda;
  arena.device_ = device;
  arena.bytes_ = bytes;
  const uint64_t rounded = AlignUp(bytes, kGranularity);
  void* base = nullptr;
  RETURN_IF_ERROR(cuda.Check(cuda.malloc(&base, rounded),
                             absl::StrCat(name, " arena: allocating ", rounded, " bytes")));
  arena.base_ = static_cast<std::byte*>(base);
  arena.handle_.resize(kIpcHandleBytes);
  absl::Status status;
  if (const int error = cuda.ipc_get_mem_handle(arena.handle_.data(), base); error != 0)
    status = NotExportable(cuda, error, name);
  if (status.ok()) {
    status = arena.OnStream(absl::StrCat(name, " arena: zeroing"), [&](void* stream) {
      return cuda.memset_async(base, 0, rounded, stream);
    });
  }
  if (!status.ok()) {
    arena.Free();
    return status;
  }
  return arena;
}

absl::Status DeviceArena::OnStream(absl::string_view doing,
                                   absl::FunctionRef<int(void* stream)> enqueue) const {
  const CudaDeviceScope scope(*cuda_, device_);
  RETURN_IF_ERROR(scope.status());
  void* stream = nullptr;
  RETURN_IF_ERROR(cuda_->Check(cuda_->stream_create(&stream, kNonBlocking), doing));
  absl::Status status = cuda_->Check(enqueue(stream), doing);
  status.Update(cuda_->Check(cuda_->stream_synchronize(stream), doing));
  status.Update(cuda_->Check(cuda_->stream_destroy(stream), doing));
  return status;
}

absl::Status DeviceArena::CopyIn(uint64_t offset, const void* host, size_t bytes) const {
  return OnStream("copying into an arena", [&](void* stream) {
    return cuda_->memcpy_async(base_ + offset, host, bytes, kHostToDevice, stream);
  });
}

absl::Status DeviceArena::CopyOut(uint64_t offset, void* host, size_t bytes) const {
  return OnStream("copying out of an arena", [&](void* stream) {
    return cuda_->memcpy_async(host, base_ + offset, bytes, kDeviceToHost, stream);
  });
}

void DeviceArena::Free() {
  if (base_ == nullptr) return;
  const CudaDeviceScope scope(*cuda_, device_);
  cuda_->free(base_);  // at the end of a process the runtime may be gone, and the memory with it
  base_ = nullptr;
}

}  // namespace dmuon::client
