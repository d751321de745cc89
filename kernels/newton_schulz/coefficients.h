// Coefficient sets of the odd polynomial x (a + b x^2 + c x^4), and what one may say about a set before running it.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_COEFFICIENTS_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_COEFFICIENTS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels {

// arXiv:2505.16932, each step divided by 1.05, 1.05^3, 1.05^5: the default.
absl::Span<const Coefficients> PolarExpress();
absl::Span<const Coefficients> You();
absl::Span<const Coefficients> Jordan();

// The coefficients of each of options.steps steps: a longer set is cut, a shorter one repeats its last.
std::vector<Coefficients> Schedule(const NewtonSchulzOptions& options);

// The value of a singular value after all steps of `schedule`, in float64.
double Evaluate(absl::Span<const Coefficients> schedule, double singular_value);

// The largest value on [0, 1].
double Maximum(absl::Span<const Coefficients> schedule);

// How far rounding to `dtype` may lift the largest singular value above 1.
double Overshoot(Dtype dtype);

// INVALID_ARGUMENT, naming the first singular value in [0, 1 + Overshoot(dtype)] where the result is not finite, below
// -0.1 or above 1.5.
absl::Status CheckSchedule(absl::Span<const Coefficients> schedule, Dtype dtype);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_COEFFICIENTS_H_
