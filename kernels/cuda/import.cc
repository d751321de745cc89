#include "kernels/cuda/import.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/checked_math.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {
namespace {

using kernels::DeviceVersions;
using kernels::MemoryHandle;

constexpr uint64_t kGranularity = 2 << 20;  // of what a trainer allocates

// Handles that are open in this process. The driver would give the same mapping a second time, and so one session another's.
struct OpenHandles {
  absl::Mutex mu;
  std::set<std::string> handles ABSL_GUARDED_BY(mu);
};
OpenHandles& Open() {
  static auto* const open = new OpenHandles();
  return *open;
}

class Claim {
 public:
  static absl::StatusOr<Claim> Take(const std::string& handle) {
    absl::MutexLock lock(&Open().mu);
    if (!Open().handles.insert(handle).second) {
      return absl::AlreadyExistsError(
          "ipc_handle: this memory is registered already; each arena needs its own allocation");
    }
    return Claim(handle);
  }
  Claim(Claim&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Claim& operator=(Claim&&) = delete;
  // Nobody gets this memory from this process any more.
  void Keep() { handle_.clear(); }
  ~Claim() {
    if (handle_.empty()) return;
    absl::MutexLock lock(&Open().mu);
    Open().handles.erase(handle_);
  }

 private:
  explicit Claim(std::string handle) : handle_(std::move(handle)) {}
  std::string handle_;
};

// One mapping of the driver's. Closed on the device that it was opened on.
class Mapping {
 public:
  Mapping(void* base, int device) : base_(base), device_(device) {}
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), device_(other.device_) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() { Close().IgnoreError(); }
  absl::Status Close() {
    void* const base = std::exchange(base_, nullptr);
    if (base == nullptr) return absl::OkStatus();
    cudaError_t error = cudaSetDevice(device_);
    if (error == cudaSuccess) error = cudaIpcCloseMemHandle(base);
    if (error == cudaSuccess || error == cudaErrorCudartUnloading) return absl::OkStatus();
    const absl::Status failed = ToStatus(error, "cudaIpcCloseMemHandle");
    Log(LogLevel::kWarning, "imported_memory_not_closed", {{"reason", failed.message()}});
    return failed;
  }
  void* base() const { return base_; }

 private:
  void* base_;
  int device_;
};

class Imported final : public kernels::ImportedMemory {
 public:
  Imported(Claim claim, Mapping mapping, uint64_t offset, uint64_t size)
      : ImportedMemory(static_cast<std::byte*>(mapping.base()) + offset, size),
        claim_(std::move(claim)),
        mapping_(std::move(mapping)) {}
  absl::Status Close() override {
    const absl::Status closed = mapping_.Close();
    if (!closed.ok()) claim_.Keep();
    return closed;
  }

 private:
  Claim claim_;  // given up after the mapping is closed
  Mapping mapping_;
};

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::Status CheckVersions(const DeviceVersions& ours, const DeviceVersions& theirs) {
  if (theirs.driver != ours.driver) {
    return absl::FailedPreconditionError(
        absl::StrCat("driver_version: expected the daemon's ", VersionText(ours.driver), " (",
                     ours.driver, "), given ", VersionText(theirs.driver), " (", theirs.driver,
                     "): trainer and daemon must load the same libcuda"));
  }
  if (theirs.runtime / 1000 != ours.runtime / 1000) {
    return absl::FailedPreconditionError(absl::StrCat(
        "runtime_version: expected CUDA ", ours.runtime / 1000, " as the daemon's, given ",
        VersionText(theirs.runtime), " (", theirs.runtime, ")"));
  }
  return absl::OkStatus();
}

absl::Status OpenFailure(cudaError_t error) {
  const std::string call =
      absl::StrCat("ipc_handle: cudaIpcOpenMemHandle: ", cudaGetErrorName(error), ": ");
  switch (error) {
    case cudaErrorDeviceUninitialized:
      return absl::FailedPreconditionError(absl::StrCat(
          call,
          "the handle looks like the daemon's own: trainer and daemon have the same pid in two "
          "pid namespaces; let the containers share one"));
    case cudaErrorInvalidResourceHandle:
    case cudaErrorInvalidValue:
      return absl::InvalidArgumentError(absl::StrCat(
          call,
          "expected a handle of cudaIpcGetMemHandle whose process lives and has not freed the "
          "memory; between containers, a shared ipc and pid namespace"));
    case cudaErrorMapBufferObjectFailed:
      return absl::FailedPreconditionError(absl::StrCat(
          call,
          "the memory cannot be mapped here: containers of trainer and daemon must share the "
          "ipc and pid namespaces and see the same device nodes"));
    case cudaErrorPeerAccessUnsupported:
      return absl::InvalidArgumentError(
          absl::StrCat(call, "the memory is on another device than the one that was named"));
    case cudaErrorNotSupported:
      return absl::FailedPreconditionError(
          absl::StrCat(call, "this platform cannot share device memory between processes"));
    default: return ToStatus(error, "ipc_handle: cudaIpcOpenMemHandle");
  }
}

// The allocation that holds `pointer`, as the driver knows it: what a trainer says of it is not believed.
absl::StatusOr<std::pair<uint64_t, uint64_t>> AddressRange(const void* pointer) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  RETURN_IF_ERROR(ToStatus(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                            12000, cudaEnableDefault, &found),
                           "looking for cuMemGetAddressRange"));
  if (found != cudaDriverEntryPointSuccess || function == nullptr)
    return absl::UnavailableError("the driver has no cuMemGetAddressRange");
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const CUresult result = reinterpret_cast<CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr)>(
      function)(&base, &bytes, reinterpret_cast<CUdeviceptr>(pointer));
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(
        absl::StrCat("cuMemGetAddressRange: CUDA driver error ", static_cast<int>(result)));
  }
  return std::make_pair(uint64_t{base}, uint64_t{bytes});
}

absl::Status CheckAllocation(const void* mapped, int device, const std::string& name,
                             const MemoryHandle& handle) {
  cudaPointerAttributes attributes = {};
  RETURN_IF_ERROR(
      ToStatus(cudaPointerGetAttributes(&attributes, mapped), "looking at imported memory"));
  if (attributes.type != cudaMemoryTypeDevice || attributes.device != device) {
    const absl::StatusOr<std::string> other = NameOf(attributes.device);
    return absl::InvalidArgumentError(
        absl::StrCat("gpu_uuid: the memory is on ",
                     other.ok() ? *other : "no device that the daemon sees", ", given ", name));
  }
  ASSIGN_OR_RETURN(const auto range, AddressRange(mapped));
  if (range.first != reinterpret_cast<uint64_t>(mapped)) {
    return absl::InvalidArgumentError(
        "ipc_handle: expected the base of an allocation, given a place inside one");
  }
  const std::optional<uint64_t> end = CheckedAdd(handle.offset, handle.size);
  if (!end.has_value() || *end > range.second) {
    return absl::InvalidArgumentError(absl::StrCat("size: offset ", handle.offset, " and ",
                                                   handle.size, " bytes, the allocation has ",
                                                   range.second));
  }
  if (range.second > AlignUp(*end, kGranularity)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ipc_handle: expected an allocation of its own, ", AlignUp(*end, kGranularity),
        " bytes, given a part of one of ", range.second,
        ": memory of a framework's allocator would be shared with all that lies beside it"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::ImportedMemory>> ImportMemory(int device,
                                                                      const std::string& name,
                                                                      const DeviceVersions& ours,
                                                                      const MemoryHandle& handle) {
  if (handle.handle.size() != CUDA_IPC_HANDLE_SIZE) {
    return absl::InvalidArgumentError(absl::StrCat("ipc_handle: expected ", CUDA_IPC_HANDLE_SIZE,
                                                   " bytes, given ", handle.handle.size()));
  }
  RETURN_IF_ERROR(CheckVersions(ours, handle.versions));
  ASSIGN_OR_RETURN(Claim claim, Claim::Take(handle.handle));
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(device), "selecting the device"));
  cudaIpcMemHandle_t raw;
  std::memcpy(&raw, handle.handle.data(), sizeof(raw));
  void* base = nullptr;
  const cudaError_t opened = cudaIpcOpenMemHandle(&base, raw, cudaIpcMemLazyEnablePeerAccess);
  if (opened != cudaSuccess) {
    (void)cudaGetLastError();  // leave nothing behind for the next launch to find
    return OpenFailure(opened);
  }
  Mapping mapping(base, device);
  RETURN_IF_ERROR(CheckAllocation(base, device, name, handle));
  return std::make_unique<Imported>(std::move(claim), std::move(mapping), handle.offset,
                                    handle.size);
}

}  // namespace dmuon::cuda
