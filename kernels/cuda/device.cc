#include "kernels/cuda/device.h"

#include <cuda_runtime_api.h>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/gpu.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {
namespace {

constexpr size_t kNameLength = 4 + 36;

bool LooksLikeAName(absl::string_view name) {
  if (name.size() != kNameLength) return false;
  if (!absl::StartsWith(name, "GPU-") && !absl::StartsWith(name, "MIG-")) return false;
  for (size_t i = 4; i < name.size(); ++i) {
    const bool dash = i == 12 || i == 17 || i == 22 || i == 27;
    if (dash ? name[i] != '-' : !absl::ascii_isxdigit(static_cast<unsigned char>(name[i])))
      return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<std::string> NameOf(int ordinal) {
  cudaDeviceProp properties = {};
  RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, ordinal), "reading the device's properties"));
  return GpuName(reinterpret_cast<const unsigned char*>(properties.uuid.bytes), properties.name);
}

absl::StatusOr<int> OrdinalOf(absl::string_view name) {
  if (!LooksLikeAName(name)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gpu_uuid: expected GPU- or MIG- and an id of 32 hexadecimal digits, given '", name, "'"));
  }
  int count = 0;
  RETURN_IF_ERROR(ToStatus(cudaGetDeviceCount(&count), "looking for CUDA devices"));
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(names.emplace_back(), NameOf(i));
    if (absl::EqualsIgnoreCase(names.back(), name)) return i;
  }
  return absl::NotFoundError(absl::StrCat("gpu_uuid: expected one that the daemon sees (",
                                          absl::StrJoin(names, ", "), "), given '", name,
                                          IsMig(name)
                                              ? "': memory is not shared between MIG instances: "
                                                "trainer and daemon need the same one in "
                                                "CUDA_VISIBLE_DEVICES"
                                              : "': look at the daemon's CUDA_VISIBLE_DEVICES"));
}

absl::Status CheckShareable(int ordinal) {
  int mode = 0, ipc = 0;
  RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, ordinal),
                           "reading the compute mode"));
  RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&ipc, cudaDevAttrIpcEventSupport, ordinal),
                           "asking whether memory can be shared"));
  ASSIGN_OR_RETURN(const std::string name, NameOf(ordinal));
  return dmuon::CheckShareable(name, {.mode = static_cast<ComputeMode>(mode), .ipc = ipc != 0});
}

absl::Status Open(int ordinal, absl::string_view product) {
  cudaError_t error = cudaSetDevice(ordinal);
  if (error == cudaSuccess) error = cudaFree(nullptr);
  if (error == cudaSuccess) return absl::OkStatus();
  const absl::Status failed = ToStatus(error, absl::StrCat("opening ", product));
  int mode = 0;
  if (cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, ordinal) != cudaSuccess) return failed;
  return ExplainNotOpened(failed, static_cast<ComputeMode>(mode));
}

}  // namespace dmuon::cuda
