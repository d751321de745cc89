// The Newton-Schulz plan of the CPU backend.
#ifndef DMUON_KERNELS_CPU_CPU_NEWTON_SCHULZ_H_
#define DMUON_KERNELS_CPU_CPU_NEWTON_SCHULZ_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels::cpu {

// `kernels` and `pool` must outlive the plan. UNIMPLEMENTED for fp16, which no processor here has units for.
absl::StatusOr<std::unique_ptr<NewtonSchulz>> PlanOnCpu(const KernelTable& kernels,
                                                        ThreadPool& pool,
                                                        const NewtonSchulzOptions& options,
                                                        int64_t rows, int64_t cols);
// What RunBatch of that plan needs for so many blocks.
absl::StatusOr<size_t> WorkspaceOnCpu(const KernelTable& kernels, const ThreadPool& pool,
                                      const NewtonSchulzOptions& options, int64_t rows,
                                      int64_t cols, int64_t blocks);

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_CPU_NEWTON_SCHULZ_H_
