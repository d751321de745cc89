// Newton-Schulz in float64, as docs/numerics.md defines it: what every backend is judged against.
#ifndef DMUON_TESTS_KERNELS_REFERENCE_H_
#define DMUON_TESTS_KERNELS_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels::reference {

// A dense, row-major matrix.
template <typename T>
struct Matrix {
  Matrix() = default;
  Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(rows * cols) {}
  T& operator()(int64_t i, int64_t j) { return values[i * cols + j]; }
  T operator()(int64_t i, int64_t j) const { return values[i * cols + j]; }

  int64_t rows = 0, cols = 0;
  std::vector<T> values;
};

// The direct form, step by step.
Matrix<double> NewtonSchulz(const Matrix<float>& in, absl::Span<const Coefficients> schedule);

// ||x - exact||_F / ||exact||_F; infinity if x is not finite.
double RelativeError(const Matrix<float>& x, const Matrix<double>& exact);

// By power iteration; infinity if x is not finite.
double TopSingularValue(const Matrix<float>& x);

}  // namespace dmuon::kernels::reference

#endif  // DMUON_TESTS_KERNELS_REFERENCE_H_
