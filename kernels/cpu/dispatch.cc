// Which kernels the processor can run.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/cpu/cpu_backend.h"

namespace dmuon::kernels {
namespace {

constexpr absl::string_view kNames[] = {
#if defined(__x86_64__)
    "avx512_bf16", "avx512", "avx2",
#endif
    "portable"};

// The first feature in a table's needs that the processor (or the system) lacks, or null.
const char* Missing(absl::string_view name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#define DMUON_NEEDS(feature) \
  if (!__builtin_cpu_supports(feature)) return feature
  if (name == "avx2" || name == "avx512" || name == "avx512_bf16") {
    DMUON_NEEDS("avx2");
    DMUON_NEEDS("fma");
  }
  if (name == "avx512" || name == "avx512_bf16") {
    DMUON_NEEDS("avx512f");
    DMUON_NEEDS("avx512bw");
    DMUON_NEEDS("avx512dq");
    DMUON_NEEDS("avx512vl");
  }
  if (name == "avx512_bf16") DMUON_NEEDS("avx512bf16");
#undef DMUON_NEEDS
#endif
  return nullptr;
}

const cpu::KernelTable& Table(absl::string_view name) {
#if defined(__x86_64__)
  if (name == "avx512_bf16") return cpu::Avx512Bf16Kernels();
  if (name == "avx512") return cpu::Avx512Kernels();
  if (name == "avx2") return cpu::Avx2Kernels();
#endif
  return cpu::PortableKernels();
}

}  // namespace

absl::Span<const absl::string_view> CpuKernelNames() { return kNames; }

absl::StatusOr<const cpu::KernelTable*> cpu::FindKernels(absl::string_view name) {
  for (absl::string_view known : kNames) {
    if (!name.empty() && name != known) continue;
    const char* missing = Missing(known);
    if (missing == nullptr) return &Table(known);
    if (!name.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("cpu kernel '", name, "': this processor lacks ", missing));
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "cpu kernel: expected one of ", absl::StrJoin(kNames, ", "), ", given '", name, "'"));
}

}  // namespace dmuon::kernels
