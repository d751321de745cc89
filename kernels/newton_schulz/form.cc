#include "kernels/newton_schulz/form.h"

#include <algorithm>

#include "kernels/newton_schulz/coefficients.h"
#include "kernels/newton_schulz/restarts.h"

namespace dmuon::kernels {

NsForm ChooseForm(const NewtonSchulzOptions& options, int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  return options.form == NsForm::kGram && 2 * n > 3 * m ? NsForm::kGram : NsForm::kDirect;
}

double Flops(const NewtonSchulzOptions& options, int64_t rows, int64_t cols) {
  const double m = std::min(rows, cols), n = std::max(rows, cols), k = options.steps;
  if (ChooseForm(options, rows, cols) == NsForm::kDirect) return k * (3 * m * m * n + m * m * m);
  const Dtype dtype = options.iteration_dtype.value_or(Dtype::kF32);
  const double r = 1 + Restarts(options, dtype).size();
  return 3 * r * m * m * n + (4 * k - 3 * r) * m * m * m;
}

}  // namespace dmuon::kernels
