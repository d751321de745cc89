// What is looked at to tell how far a matrix is from orthogonal. Plain C++17: the CUDA compiler reads it, too.
#ifndef DMUON_KERNELS_OPS_ORTHOGONALITY_SAMPLE_H_
#define DMUON_KERNELS_OPS_ORTHOGONALITY_SAMPLE_H_

#include <cstdint>

namespace dmuon::kernels {

// Of a dense rows x cols matrix O with m = rows <= cols (else read columns for rows): `count` of its m rows, those at `at`.
// ||O O^T - I||_F^2 / m is estimated from their products g with each other:
//   on_diagonal sum_i (g_ii - 1)^2 + beside_it sum_{i<j} g_ij^2,
// which is the mean of the former and m - 1 times the mean of the latter.
//
// count = m / 8 but at least 8 and at most 32 (all m below 8): count^2 n FLOPs beside the 6 to 15 m^2 n of what made O. A
// function of the shape alone.
struct OrthogonalitySample {
  static constexpr int64_t kMost = 32;
  // Sampled columns of a tall matrix lie in groups of this many neighbours: each group touches a cache line of every row.
  static constexpr int64_t kNeighbours = 4;

  OrthogonalitySample() = default;
  OrthogonalitySample(int64_t rows, int64_t cols);

  int64_t at[kMost] = {};
  int64_t count = 0;
  double on_diagonal = 0;
  double beside_it = 0;
};

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_OPS_ORTHOGONALITY_SAMPLE_H_
