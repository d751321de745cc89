// Where the gram form starts anew from X: positions that hold depend on set, steps and dtype, so they are tried out on
// small matrices with hard spectra, in the arithmetic of the dtype.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_RESTARTS_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_RESTARTS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels {

// The largest singular value that the gram form leaves on matrices with spectra logspace(0, -10), logspace(0, -4) and 1/i,
// every stored matrix rounded to `dtype`. Infinity when the run is not finite.
double TrialTopSingularValue(absl::Span<const Coefficients> schedule,
                             absl::Span<const int> restarts, Dtype dtype);

// The fewest restarts whose trial stays within the bound of docs/numerics.md; the best of those that there are, if none
// does. Remembered, since plans of one session ask the same question.
std::vector<int> DeriveRestarts(absl::Span<const Coefficients> schedule, Dtype dtype);

// INVALID_ARGUMENT: positions out of range or not ascending, or a trial that explodes. Remembered, too.
absl::Status CheckRestarts(absl::Span<const Coefficients> schedule, absl::Span<const int> restarts,
                           Dtype dtype);

// What the matrices of an iteration keep, as far as restarts go, where it stores `dtype`: TF32 factors have the bits of fp16.
inline Dtype RestartDtype(const NewtonSchulzOptions& options, Dtype dtype) {
  return options.tf32 ? Dtype::kF16 : dtype;
}

// options.restarts, or those derived for `dtype`.
std::vector<int> Restarts(const NewtonSchulzOptions& options, Dtype dtype);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_RESTARTS_H_
