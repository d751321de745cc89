#include "kernels/newton_schulz/form.h"

#include <algorithm>

#include "kernels/newton_schulz/cost_table.h"
#include "kernels/newton_schulz/restarts.h"

namespace dmuon::kernels {
namespace {

// Gram runs where it takes at most this much of the time of direct.
constexpr double kWorthGram = 0.95;

}  // namespace

NsForm ChooseForm(const NewtonSchulzOptions& options, int64_t rows, int64_t cols) {
  if (options.form == NsForm::kDirect) return NsForm::kDirect;
  const CostSeries* series = options.costs ? FindSeries(*options.costs, options) : nullptr;
  if (series != nullptr) {
    const double gram = Seconds(*series, NsForm::kGram, options, rows, cols),
                 direct = Seconds(*series, NsForm::kDirect, options, rows, cols);
    return gram <= kWorthGram * direct ? NsForm::kGram : NsForm::kDirect;
  }
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  return 2 * n > 3 * m ? NsForm::kGram : NsForm::kDirect;
}

double FlopsOfForm(NsForm form, const NewtonSchulzOptions& options, int64_t rows, int64_t cols) {
  const double m = static_cast<double>(std::min(rows, cols)),
               n = static_cast<double>(std::max(rows, cols)), k = options.steps;
  if (form == NsForm::kDirect) return k * (3 * m * m * n + m * m * m);
  const Dtype dtype = RestartDtype(
      options, options.deterministic ? Dtype::kF32 : options.iteration_dtype.value_or(Dtype::kF32));
  const double r = 1 + static_cast<double>(Restarts(options, dtype).size());
  return 3 * r * m * m * n + (4 * k - 3 * r) * m * m * m;
}

double Flops(const NewtonSchulzOptions& options, int64_t rows, int64_t cols) {
  return FlopsOfForm(ChooseForm(options, rows, cols), options, rows, cols);
}

}  // namespace dmuon::kernels
