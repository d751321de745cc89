// Both forms of the iteration, written once over the few matrix operations that a backend fills in.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_ITERATION_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_ITERATION_H_

#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels {

// One run on one matrix X (m x n, m <= n, loaded and normalised by the implementation) and its m x m matrices, which
// the iteration names by slot. All m x m matrices are symmetric and commute: compute one triangle, mirror it. An
// output slot is never one of its operation's left or right operands; it may be `e`.
class MatrixOps {
 public:
  static constexpr int kSymmetricSlots = 4;

  // What follows belongs to step `step` of `steps`, from 0: late errors have little time to grow.
  virtual void BeginStep(int /*step*/, int /*steps*/) {}
  // slot r = X X^T
  virtual void Gram(int r) = 0;
  // slot out = alpha slot[left] slot[right] + beta slot[e]
  virtual void Multiply(int out, double alpha, int left, int right, double beta, int e) = 0;
  // slot out = slot[z] + a I
  virtual void AddIdentity(int out, int z, double a) = 0;
  // X = slot[q] X + a X; `last`: the result is wanted as the output, and X no more.
  virtual void Apply(int q, double a, bool last) = 0;

 protected:
  ~MatrixOps() = default;
};

// A = X X^T; B = b A + c A A; X = a X + B X. Uses slots 0 and 1.
void IterateDirect(absl::Span<const Coefficients> schedule, MatrixOps& ops);

// R = X X^T; Z = b R + c R R; Q = Z + a I, later Q Z + a Q; R = (R Z + a R)(Z + a I); at a restart and at the end
// X = Q X. Uses four slots.
void IterateGram(absl::Span<const Coefficients> schedule, absl::Span<const int> restarts,
                 MatrixOps& ops);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_ITERATION_H_
