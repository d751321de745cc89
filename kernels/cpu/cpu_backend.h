// The backend of machines without a GPU: own packed kernels, chosen by what the processor can do.
#ifndef DMUON_KERNELS_CPU_CPU_BACKEND_H_
#define DMUON_KERNELS_CPU_CPU_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/ops/backend.h"

namespace dmuon::kernels {

struct CpuBackendOptions {
  int threads = 1;     // cores for all workers together, >= 1
  std::string kernel;  // of CpuKernelNames(); empty: DMUON_CPU_KERNEL, else the best that runs here
  std::string why;     // for the description: why this backend and no other
};

// INVALID_ARGUMENT for an unknown kernel or thread count; FAILED_PRECONDITION, naming what the processor lacks, for a
// kernel that it cannot run.
absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options);

// "avx512_bf16", "avx512", "avx2", "portable": best first.
absl::Span<const absl::string_view> CpuKernelNames();

namespace cpu {
// The table for `name`, or an error as above. Empty: the best.
absl::StatusOr<const KernelTable*> FindKernels(absl::string_view name);
}  // namespace cpu

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_CPU_CPU_BACKEND_H_
