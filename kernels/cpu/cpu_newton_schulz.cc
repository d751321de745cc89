#include "kernels/cpu/cpu_newton_schulz.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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

class CpuNewtonSchulz final : public NewtonSchulz {
 public:
  CpuNewtonSchulz(const KernelTable& kernels, ThreadPool& pool, NsForm form,
                  std::vector<Coefficients> schedule, std::vector<int> restarts,
                  const RunLayout& layout)
      : kernels_(kernels),
        pool_(pool),
        form_(form),
        schedule_(std::move(schedule)),
        restarts_(std::move(restarts)),
        layout_(layout) {}

  size_t workspace_bytes() const override { return layout_.bytes; }

  void Run(Stream, const float* in, float* out, void* workspace) const override {
    ThreadPool::Lease lease(pool_);
    CpuMatrixOps ops(kernels_, pool_, layout_, workspace, out);
    if (!ops.Load(in)) {
      std::memset(out, 0, sizeof(float) * layout_.rows * layout_.cols);
    } else if (form_ == NsForm::kGram) {
      IterateGram(schedule_, restarts_, ops);
    } else {
      IterateDirect(schedule_, ops);
    }
  }

  NsForm form() const override { return form_; }

  std::string kernel() const override {
    const char* precision = layout_.precision == Precision::kF32     ? "fp32"
                            : layout_.precision == Precision::kMixed ? "mixed bf16"
                                                                     : "bf16";
    return absl::StrCat(form_ == NsForm::kGram ? "gram " : "direct ", precision, " (",
                        kernels_.name, ")");
  }

 private:
  const KernelTable& kernels_;
  ThreadPool& pool_;
  const NsForm form_;
  const std::vector<Coefficients> schedule_;
  const std::vector<int> restarts_;
  const RunLayout layout_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NewtonSchulz>> PlanOnCpu(const KernelTable& kernels,
                                                        ThreadPool& pool,
                                                        const NewtonSchulzOptions& options,
                                                        int64_t rows, int64_t cols) {
  if (options.iteration_dtype == Dtype::kF16 && !options.deterministic) {
    return absl::UnimplementedError(
        "Newton-Schulz: iteration dtype fp16 is not built on the cpu backend; ask for bf16 or fp32, or "
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
  const RunLayout layout(rows, cols, precision, slots, apply_in_between);
  return std::make_unique<CpuNewtonSchulz>(kernels, pool, form, std::move(schedule),
                                           std::move(restarts), layout);
}

}  // namespace dmuon::kernels::cpu
