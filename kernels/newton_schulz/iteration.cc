#include "kernels/newton_schulz/iteration.h"

#include <algorithm>
#include <utility>

namespace dmuon::kernels {

void IterateDirect(absl::Span<const Coefficients> schedule, MatrixOps& ops) {
  constexpr int kA = 0, kB = 1;
  for (size_t i = 0; i < schedule.size(); ++i) {
    const auto& [a, b, c] = schedule[i];
    ops.BeginStep(static_cast<int>(i), static_cast<int>(schedule.size()));
    ops.Gram(kA);
    ops.Multiply(kB, c, kA, kA, b, kA);
    ops.Apply(kB, a, i + 1 == schedule.size());
  }
}

void IterateGram(absl::Span<const Coefficients> schedule, absl::Span<const int> restarts,
                 MatrixOps& ops) {
  // Four slots, one of them always free: the products of a step never write what they read.
  int r = 0, z = 1, q = 2, free = 3;
  const auto restarts_before = [&](int step) {
    return std::find(restarts.begin(), restarts.end(), step) != restarts.end();
  };
  const int steps = static_cast<int>(schedule.size());
  ops.Gram(r);
  bool first = true;  // of a segment: Q is still the identity
  for (int i = 0; i < steps; ++i) {
    const auto& [a, b, c] = schedule[i];
    ops.BeginStep(i, steps);
    ops.Multiply(z, c, r, r, b, r);
    if (first) {
      ops.AddIdentity(q, z, a);
    } else {
      ops.Multiply(free, 1, q, z, a, q);
      std::swap(q, free);
    }
    first = false;
    const bool last = i + 1 == steps;
    if (last || restarts_before(i + 1)) {
      ops.Apply(q, 0, last);
      if (!last) ops.Gram(r);
      first = true;
    } else {
      ops.Multiply(free, 1, r, z, a, r);     // T = R Z + a R
      ops.Multiply(r, 1, z, free, a, free);  // R = Z T + a T
    }
  }
}

}  // namespace dmuon::kernels
