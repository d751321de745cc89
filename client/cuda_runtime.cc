#include "client/cuda_runtime.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/gpu.h"
#include "base/status_macros.h"

namespace dmuon::client {
namespace {

constexpr char kLibrary[] = "libcudart.so.13";

// Of cudaError_t, which is the same in all releases.
constexpr int kMemoryAllocation = 2;
constexpr int kInsufficientDriver = 35;
constexpr int kDevicesUnavailable = 46;
constexpr int kNoDevice = 100;

template <typename F>
absl::Status Find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(kLibrary, " has no ", name));
}

absl::Status Fill(void* library, CudaRuntime& cuda) {
  RETURN_IF_ERROR(Find(library, "cudaGetDeviceCount", cuda.get_device_count));
  RETURN_IF_ERROR(Find(library, "cudaGetDevice", cuda.get_device));
  RETURN_IF_ERROR(Find(library, "cudaSetDevice", cuda.set_device));
  RETURN_IF_ERROR(Find(library, "cudaGetDeviceProperties", cuda.get_device_properties));
  RETURN_IF_ERROR(Find(library, "cudaDeviceGetAttribute", cuda.get_attribute));
  RETURN_IF_ERROR(Find(library, "cudaDriverGetVersion", cuda.driver_get_version));
  RETURN_IF_ERROR(Find(library, "cudaRuntimeGetVersion", cuda.runtime_get_version));
  RETURN_IF_ERROR(Find(library, "cudaMalloc", cuda.malloc));
  RETURN_IF_ERROR(Find(library, "cudaFree", cuda.free));
  RETURN_IF_ERROR(Find(library, "cudaMemsetAsync", cuda.memset_async));
  RETURN_IF_ERROR(Find(library, "cudaMemcpyAsync", cuda.memcpy_async));
  RETURN_IF_ERROR(Find(library, "cudaStreamCreateWithFlags", cuda.stream_create));
  RETURN_IF_ERROR(Find(library, "cudaStreamDestroy", cuda.stream_destroy));
  RETURN_IF_ERROR(Find(library, "cudaStreamSynchronize", cuda.stream_synchronize));
  RETURN_IF_ERROR(Find(library, "cudaEventCreateWithFlags", cuda.event_create));
  RETURN_IF_ERROR(Find(library, "cudaEventRecord", cuda.event_record));
  RETURN_IF_ERROR(Find(library, "cudaEventSynchronize", cuda.event_synchronize));
  RETURN_IF_ERROR(Find(library, "cudaEventDestroy", cuda.event_destroy));
  RETURN_IF_ERROR(Find(library, "cudaIpcGetMemHandle", cuda.ipc_get_mem_handle));
  RETURN_IF_ERROR(Find(library, "cudaGetLastError", cuda.get_last_error));
  RETURN_IF_ERROR(Find(library, "cudaGetErrorName", cuda.get_error_name));
  return Find(library, "cudaGetErrorString", cuda.get_error_string);
}

}  // namespace

absl::StatusOr<const CudaRuntime*> CudaRuntime::Load() {
  static absl::Mutex mu;
  static const CudaRuntime* loaded = nullptr;
  absl::MutexLock lock(&mu);
  if (loaded != nullptr) return loaded;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the daemon computes on GPUs, and this process has no CUDA runtime: ", dlerror(),
        "; import torch before, or put it on LD_LIBRARY_PATH"));
  }
  auto* cuda = new CudaRuntime();
  if (const absl::Status filled = Fill(library, *cuda); !filled.ok()) {
    delete cuda;
    dlclose(library);
    return filled;
  }
  loaded = cuda;
  return loaded;
}

absl::Status CudaRuntime::Check(int error, absl::string_view doing) const {
  if (error == 0) return absl::OkStatus();
  get_last_error();  // leave nothing behind for the program's own next call
  const std::string text =
      absl::StrCat(doing, ": ", get_error_name(error), ", ", get_error_string(error));
  switch (error) {
    case kMemoryAllocation: return absl::ResourceExhaustedError(text);
    case kDevicesUnavailable:
    case kInsufficientDriver:
    case kNoDevice: return absl::UnavailableError(text);
    default: return absl::InternalError(text);
  }
}

absl::StatusOr<std::string> CudaRuntime::NameOf(int device) const {
  CudaDeviceStart properties = {};
  RETURN_IF_ERROR(Check(get_device_properties(&properties, device),
                        absl::StrCat("reading the properties of device ", device)));
  properties.name[sizeof(properties.name) - 1] = '\0';
  return GpuName(properties.uuid, properties.name);
}

absl::Status CudaRuntime::CheckShareable(int device) const {
  int mode = 0, ipc = 0;
  RETURN_IF_ERROR(
      Check(get_attribute(&mode, kComputeModeAttribute, device), "reading the compute mode"));
  RETURN_IF_ERROR(Check(get_attribute(&ipc, kIpcAttribute, device),
                        "asking whether memory can be shared between processes"));
  ASSIGN_OR_RETURN(const std::string name, NameOf(device));
  return dmuon::CheckShareable(name, {.mode = static_cast<ComputeMode>(mode), .ipc = ipc != 0});
}

CudaDeviceScope::CudaDeviceScope(const CudaRuntime& cuda, int device)
    : cuda_(cuda), device_(device) {
  status_ = cuda.Check(cuda.get_device(&before_), "asking for the current device");
  // Also when it is the current one: a process that has not touched it has no context there.
  if (!status_.ok()) return;
  status_ = cuda.Check(cuda.set_device(device), absl::StrCat("selecting device ", device));
  int mode = 0;
  if (!status_.ok() && cuda.get_attribute(&mode, kComputeModeAttribute, device) == 0)
    status_ = ExplainNotOpened(status_, static_cast<ComputeMode>(mode));
}

CudaDeviceScope::~CudaDeviceScope() {
  if (before_ >= 0 && before_ != device_) cuda_.set_device(before_);
}

}  // namespace dmuon::client
