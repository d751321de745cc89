#include "kernels/ops/backend.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/loader.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels {
namespace {

constexpr absl::string_view kNames[] = {"cuda", "cpu"};  // as "auto" tries them
constexpr int kDevice = 0;

}  // namespace

Backend::~Backend() = default;

absl::StatusOr<NewtonSchulzMemory> Backend::MemoryOfNewtonSchulz(const NewtonSchulzOptions&,
                                                                 int64_t, int64_t, int64_t) const {
  return absl::UnimplementedError(absl::StrCat("Newton-Schulz on backend '", name(), "'"));
}

absl::StatusOr<std::unique_ptr<NewtonSchulz>> Backend::MakeNewtonSchulz(const NewtonSchulzOptions&,
                                                                        int64_t, int64_t, int64_t) {
  return absl::UnimplementedError(absl::StrCat("Newton-Schulz on backend '", name(), "'"));
}

uint64_t Backend::Mark(Stream) { return 0; }
absl::StatusOr<bool> Backend::Reached(Stream, uint64_t) { return true; }

absl::StatusOr<Backend*> Backend::OnDevice(absl::string_view device) {
  if (device.empty()) return this;
  return absl::FailedPreconditionError(absl::StrCat(
      "device: backend '", name(), "' computes in the host's memory, given device '", device, "'"));
}

absl::Status Backend::EnableAccess(const Backend&) { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<ImportedMemory>> Backend::Import(const MemoryHandle&) {
  return absl::UnimplementedError(absl::StrCat("device memory on backend '", name(), "'"));
}

absl::Span<const absl::string_view> BackendNames() { return kNames; }

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(absl::string_view name, int threads) {
  if (name == "cpu") return CreateCpuBackend({.threads = threads});
  if (name == "cuda") return cuda::LoadBackend(kDevice);
  if (name == "auto") {
    absl::StatusOr<std::unique_ptr<Backend>> cuda = cuda::LoadBackend(kDevice);
    if (cuda.ok()) return cuda;
    return CreateCpuBackend(
        {.threads = threads, .why = absl::StrCat("no cuda: ", cuda.status().message())});
  }
  return absl::InvalidArgumentError(absl::StrCat("backend: expected auto or one of ",
                                                 absl::StrJoin(BackendNames(), ", "), ", given '",
                                                 name, "'"));
}

}  // namespace dmuon::kernels
