// The part of libcudart that a trainer's arenas need, opened when a daemon asks for device memory: this library links no
// CUDA, and a process that has the runtime already (PyTorch brings its own) keeps that one.
#ifndef DMUON_CLIENT_CUDA_RUNTIME_H_
#define DMUON_CLIENT_CUDA_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuon::client {

inline constexpr size_t kIpcHandleBytes = 64;

// cudaDeviceProp starts with the name of the product and the id; the rest differs between releases.
struct CudaDeviceStart {
  char name[256];
  unsigned char uuid[16];
  std::byte rest[4096 - 272];
};

// Thread-safe. Errors are cudaError_t.
class CudaRuntime {
 public:
  // FAILED_PRECONDITION: no such library, or one without a function that is needed; says which.
  static absl::StatusOr<const CudaRuntime*> Load();

  int (*get_device_count)(int*) = nullptr;
  int (*get_device)(int*) = nullptr;
  int (*set_device)(int) = nullptr;
  int (*get_device_properties)(CudaDeviceStart*, int) = nullptr;
  int (*get_attribute)(int*, int, int) = nullptr;
  int (*driver_get_version)(int*) = nullptr;
  int (*runtime_get_version)(int*) = nullptr;
  int (*malloc)(void**, size_t) = nullptr;
  int (*free)(void*) = nullptr;
  int (*memset_async)(void*, int, size_t, void*) = nullptr;
  int (*memcpy_async)(void*, const void*, size_t, int, void*) = nullptr;
  int (*stream_create)(void**, unsigned) = nullptr;
  int (*stream_destroy)(void*) = nullptr;
  int (*stream_synchronize)(void*) = nullptr;
  int (*event_create)(void**, unsigned) = nullptr;
  int (*event_record)(void*, void*) = nullptr;
  int (*event_synchronize)(void*) = nullptr;
  int (*event_destroy)(void*) = nullptr;
  int (*ipc_get_mem_handle)(void*, void*) = nullptr;
  int (*get_last_error)() = nullptr;
  const char* (*get_error_name)(int) = nullptr;
  const char* (*get_error_string)(int) = nullptr;

  // "doing: cudaErrorX, text". RESOURCE_EXHAUSTED: out of memory; UNAVAILABLE: no driver, no device, or one that others
  // have for themselves; INTERNAL else.
  absl::Status Check(int error, absl::string_view doing) const;
  // "GPU-..." or "MIG-...", as the daemon names its devices.
  absl::StatusOr<std::string> NameOf(int device) const;
  // Before anything is made there: as base/gpu.h says it.
  absl::Status CheckShareable(int device) const;
};

// The calling thread's device for as long as it lives; then the one before.
class CudaDeviceScope {
 public:
  CudaDeviceScope(const CudaRuntime& cuda, int device);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  const CudaRuntime& cuda_;
  const int device_;
  int before_ = -1;
  absl::Status status_;
};

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_CUDA_RUNTIME_H_
