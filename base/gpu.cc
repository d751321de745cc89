#include "base/gpu.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace dmuon {
namespace {

constexpr absl::string_view kMigPrefix = "MIG-";

std::string KernelRelease() {
  std::string release;
  std::getline(std::ifstream("/proc/sys/kernel/osrelease") >> std::ws, release);
  return release;
}

std::string InTheWay(ComputeMode mode) {
  switch (mode) {
    case ComputeMode::kDefault: return "";
    case ComputeMode::kProhibited:
      return " is in compute mode prohibited: expected default (nvidia-smi -c 0)";
    case ComputeMode::kExclusiveThread:
    case ComputeMode::kExclusiveProcess: break;
  }
  return " is in an exclusive compute mode, so trainer and daemon cannot both use it: expected "
         "default (nvidia-smi -c 0), or MPS for both";
}

}  // namespace

std::string GpuName(const unsigned char* uuid, absl::string_view product) {
  std::string name(absl::StrContains(product, " MIG ") ? kMigPrefix : "GPU-");
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    absl::StrAppend(&name, absl::Hex(uuid[i], absl::kZeroPad2));
  }
  return name;
}

bool IsMig(absl::string_view name) { return absl::StartsWith(name, kMigPrefix); }

absl::Status CheckShareable(const std::string& name, const GpuSharing& sharing) {
  // NVIDIA's guide promises handles there; those who tried could not open them.
  if (IsWsl(KernelRelease())) {
    return absl::FailedPreconditionError(
        "sharing device memory between processes is not supported under WSL: use the cpu backend");
  }
  if (!sharing.ipc) {
    return absl::FailedPreconditionError(
        absl::StrCat(name,
                     ": its driver does not share device memory between processes "
                     "(cudaDevAttrIpcEventSupport is 0): use the cpu backend"));
  }
  const std::string mode = InTheWay(sharing.mode);
  if (mode.empty() || (sharing.mode != ComputeMode::kProhibited && UsesMps()))
    return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(name, mode));
}

absl::Status ExplainNotOpened(const absl::Status& failed, ComputeMode mode) {
  const std::string in_the_way = InTheWay(mode);
  if (failed.ok() || in_the_way.empty()) return failed;
  return absl::UnavailableError(absl::StrCat(failed.message(), ": it", in_the_way));
}

bool UsesMps() {
  static const bool uses = [] {
    const char* directory = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
    const std::string control =
        absl::StrCat(directory != nullptr ? directory : "/tmp/nvidia-mps", "/control");
    return access(control.c_str(), W_OK) == 0;
  }();
  return uses;
}

bool IsWsl(absl::string_view release) {
  return absl::StrContains(absl::AsciiStrToLower(release), "microsoft");
}

}  // namespace dmuon
