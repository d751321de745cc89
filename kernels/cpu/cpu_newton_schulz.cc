#include "kernels/cpu/cpu_newton_schulz.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/checked_math.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_matrix_ops.h"
#include "kernels/newton_schulz/coefficients.h"
#include "kernels/newton_schulz/form.h"
#include "kernels/newton_schulz/iteration.h"
#include "kernels/newton_schulz/restarts.h"

namespace dmuon::kernels::cpu {
namespace {

// A small block gains no time in bf16, and too few values for their rounding errors to average out.
constexpr int64_t kSmallestForBf16 = 64;

// bf16 where the processor has units for it, unless fp32 is asked for.
bool UsesBf16(const KernelTable& kernels, const NewtonSchulzOptions& options, int64_t m) {
  if (options.deterministic || m < kSmallestForBf16) return false;
  return options.iteration_dtype.value_or(kernels.bf16_units ? Dtype::kBF16 : Dtype::kF32) ==
         Dtype::kBF16;
}

Precision PrecisionFor(bool bf16, NsForm form) {
  if (!bf16) return Precision::kF32;
  return form == NsForm::kGram ? Precision::kMixed : Precision::kBf16;
}

// Blocks with a larger workspace gain nothing by having a core each (kernels/README.md).
constexpr size_t kLargestForBatch = size_t{4} << 20;
constexpr size_t kSeatAlignment = 256;

// Which parts of a batch's workspace are free. As many threads at once as there are seats.
class SeatTable {
 public:
  static constexpr int64_t kMost = 64;
  explicit SeatTable(int64_t seats) : free_(~uint64_t{0} >> (kMost - seats)) {}

  int64_t Take() {
    for (uint64_t free = free_.load();;) {
      // More threads than seats, where there are more than 64 cores: the next to leave is a block away.
      if (free == 0) {
        free = free_.load();
      } else if (free_.compare_exchange_weak(free, free & (free - 1), std::memory_order_acquire)) {
        return std::countr_zero(free);
      }
    }
  }
  void Leave(int64_t seat) { free_.fetch_or(uint64_t{1} << seat, std::memory_order_release); }

 private:
  std::atomic<uint64_t> free_;
};

// What runs on a block, and where in its workspace.
struct RunPlan {
  NsForm form;
  std::vector<Coefficients> schedule;
  std::vector<int> restarts;
  RunLayout layout;

  size_t seat_bytes() const { return AlignUp(layout.bytes, kSeatAlignment); }
  // How many blocks of a batch run at once.
  int64_t Seats(const ThreadPool& pool, int64_t count) const {
    if (layout.bytes > kLargestForBatch) return 1;
    return std::clamp<int64_t>(pool.threads(), 1, std::min(count, SeatTable::kMost));
  }
};

absl::StatusOr<RunPlan> PlanRun(const KernelTable& kernels, const NewtonSchulzOptions& options,
                                int64_t rows, int64_t cols) {
  if (options.tf32) {
    return absl::UnimplementedError(
        "Newton-Schulz: tf32 is not built on the cpu backend; ask for bf16 or fp32, or for none");
  }
  if (options.iteration_dtype == Dtype::kF16 && !options.deterministic) {
    return absl::UnimplementedError(
        "Newton-Schulz: iteration dtype fp16 is not built on the cpu backend; ask for bf16 or "
        "fp32, or "
        "for none");
  }
  const NsForm form = ChooseForm(options, rows, cols);
  const Precision precision = PrecisionFor(UsesBf16(kernels, options, std::min(rows, cols)), form);
  std::vector<Coefficients> schedule = Schedule(options);
  std::vector<int> restarts;
  bool apply_in_between = schedule.size() > 1;
  if (form == NsForm::kGram) {
    // Mixed too iterates on its m x m matrices in fp32.
    restarts = Restarts(options, Dtype::kF32);
    if (options.restarts.has_value())
      RETURN_IF_ERROR(CheckRestarts(schedule, restarts, Dtype::kF32));
    apply_in_between = !restarts.empty();
  }
  const int slots = form == NsForm::kGram ? MatrixOps::kSymmetricSlots : 2;
  return RunPlan{form, std::move(schedule), std::move(restarts),
                 RunLayout(rows, cols, precision, slots, apply_in_between)};
}

class CpuNewtonSchulz final : public NewtonSchulz {
 public:
  CpuNewtonSchulz(const KernelTable& kernels, ThreadPool& pool, RunPlan run)
      : kernels_(kernels), pool_(pool), run_(std::move(run)) {}

  size_t workspace_bytes() const override { return run_.layout.bytes; }
  size_t batch_workspace_bytes(int64_t count) const override {
    return run_.Seats(pool_, count) * run_.seat_bytes();
  }

  void Run(Stream, const float* in, float* out, void* workspace) const override {
    ThreadPool::Lease lease(pool_);
    RunOne(pool_, in, out, nullptr, workspace);
  }

  void RunBatch(Stream, const NewtonSchulzBatch& batch) const override {
    ThreadPool::Lease lease(pool_);
    const auto count = static_cast<int64_t>(batch.offsets.size());
    const auto run = [&](ThreadPool& pool, int64_t i, void* workspace) {
      const int64_t offset = batch.offsets[i];
      RunOne(pool, batch.in + offset, batch.out + offset,
             batch.norms != nullptr ? &batch.norms[i] : nullptr, workspace);
    };
    // A block to a core: the products of a small one are too short to be shared. One that is left over is shared all the
    // same, rather than that the other cores wait for it.
    const int64_t seats = run_.Seats(pool_, count);
    const int64_t apart = seats == 1 ? 0 : count % seats == 1 ? count - 1 : count;
    SeatTable free(seats);
    pool_.Run(apart, [&](int64_t i) {
      const int64_t seat = free.Take();
      run(alone_, i, static_cast<std::byte*>(batch.workspace) + seat * run_.seat_bytes());
      free.Leave(seat);
    });
    for (int64_t i = apart; i < count; ++i) run(pool_, i, batch.workspace);
  }

  NsForm form() const override { return run_.form; }

  std::string kernel() const override {
    const char* precision = run_.layout.precision == Precision::kF32     ? "fp32"
                            : run_.layout.precision == Precision::kMixed ? "mixed bf16"
                                                                         : "bf16";
    return absl::StrCat(run_.form == NsForm::kGram ? "gram " : "direct ", precision, " (",
                        kernels_.name, ")");
  }

 private:
  void RunOne(ThreadPool& pool, const float* in, float* out, const BlockNorm* norm,
              void* workspace) const {
    CpuMatrixOps ops(kernels_, pool, run_.layout, workspace, out);
    if (!ops.Load(in, norm != nullptr ? *norm : ops.NormOf(in))) {
      std::memset(out, 0, sizeof(float) * run_.layout.rows * run_.layout.cols);
    } else if (run_.form == NsForm::kGram) {
      IterateGram(run_.schedule, run_.restarts, ops);
    } else {
      IterateDirect(run_.schedule, ops);
    }
  }

  const KernelTable& kernels_;
  ThreadPool& pool_;
  mutable ThreadPool alone_{1};  // runs every piece on the thread that calls
  const RunPlan run_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NewtonSchulz>> PlanOnCpu(const KernelTable& kernels,
                                                        ThreadPool& pool,
                                                        const NewtonSchulzOptions& options,
                                                        int64_t rows, int64_t cols) {
  ASSIGN_OR_RETURN(RunPlan run, PlanRun(kernels, options, rows, cols));
  return std::make_unique<CpuNewtonSchulz>(kernels, pool, std::move(run));
}

absl::StatusOr<size_t> WorkspaceOnCpu(const KernelTable& kernels, const ThreadPool& pool,
                                      const NewtonSchulzOptions& options, int64_t rows,
                                      int64_t cols, int64_t blocks) {
  ASSIGN_OR_RETURN(const RunPlan run, PlanRun(kernels, options, rows, cols));
  return run.Seats(pool, blocks) * run.seat_bytes();
}

}  // namespace dmuon::kernels::cpu
