#include "kernels/cuda/device.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

// With MPS, processes share an exclusive device through its server.
bool MpsRuns() {
  const char* pipe = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  return access(absl::StrCat(pipe != nullptr ? pipe : "/tmp/nvidia-mps", "/control").c_str(),
                F_OK) == 0;
}

}  // namespace

std::string DeviceName(const unsigned char* uuid, absl::string_view product) {
  std::string name = absl::StrContains(product, " MIG ") ? "MIG-" : "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    absl::StrAppend(&name, absl::Hex(uuid[i], absl::kZeroPad2));
  }
  return name;
}

absl::StatusOr<std::string> NameOf(int ordinal) {
  cudaDeviceProp properties = {};
  RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, ordinal), "reading the device's properties"));
  return DeviceName(reinterpret_cast<const unsigned char*>(properties.uuid.bytes), properties.name);
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
  return absl::NotFoundError(absl::StrCat(
      "gpu_uuid: expected one that the daemon sees (", absl::StrJoin(names, ", "), "), given '",
      name,
      absl::StartsWith(name, "MIG-")
          ? "': a process sees a single MIG instance, so trainer and daemon need the same one in "
            "CUDA_VISIBLE_DEVICES"
          : "': look at the daemon's CUDA_VISIBLE_DEVICES"));
}

absl::Status CheckShareable(int ordinal) {
  std::string release;
  std::getline(std::ifstream("/proc/sys/kernel/osrelease") >> std::ws, release);
  if (IsWsl(release)) {
    return absl::FailedPreconditionError(
        "CUDA under WSL cannot share device memory between processes: use the cpu backend");
  }
  int mode = cudaComputeModeDefault;
  RETURN_IF_ERROR(ToStatus(cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, ordinal),
                           "reading the compute mode"));
  if (mode == cudaComputeModeDefault) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::string name, NameOf(ordinal));
  if (mode == cudaComputeModeProhibited) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, " is in compute mode prohibited: expected default (nvidia-smi -c 0)"));
  }
  if (MpsRuns()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(name,
                   " is in an exclusive compute mode, so trainer and daemon cannot both use "
                   "it: expected default (nvidia-smi -c 0), or MPS"));
}

bool IsWsl(absl::string_view release) {
  return absl::StrContains(absl::AsciiStrToLower(release), "microsoft");
}

}  // namespace dmuon::cuda
