// What the CUDA backend is judged against: docs/numerics.md in float64, as plainly as it can be written.
#ifndef DMUON_TESTS_CUDA_REFERENCE_H_
#define DMUON_TESTS_CUDA_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::cuda::reference {

using Vector = std::vector<double>;

inline Vector Widen(const std::vector<float>& x) { return Vector(x.begin(), x.end()); }

// ||a - b|| / ||b||; infinite when a has a value that is not finite.
template <typename T>
double RelativeError(const std::vector<T>& a, const Vector& b) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    if (!std::isfinite(static_cast<double>(a[i]))) return HUGE_VAL;
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

inline std::vector<float> Gaussian(size_t count, uint32_t seed, double scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, scale);
  std::vector<float> x(count);
  for (float& value : x) value = static_cast<float>(normal(random));
  return x;
}

// c (m x n) = a (m x k) b (k x n), row-major.
inline Vector Multiply(const Vector& a, const Vector& b, int64_t m, int64_t k, int64_t n) {
  Vector c(static_cast<size_t>(m * n), 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      const double factor = a[static_cast<size_t>(i * k + l)];
      for (int64_t j = 0; j < n; ++j)
        c[static_cast<size_t>(i * n + j)] += factor * b[static_cast<size_t>(l * n + j)];
    }
  }
  return c;
}

inline Vector Transposed(const Vector& a, int64_t rows, int64_t cols) {
  Vector t(a.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      t[static_cast<size_t>(j * rows + i)] = a[static_cast<size_t>(i * cols + j)];
  }
  return t;
}

// The direct form in float64: the exact polynomial of the singular values, for what fp32 can show.
inline Vector NewtonSchulz(const std::vector<float>& in, int64_t rows, int64_t cols,
                           absl::Span<const kernels::Coefficients> schedule) {
  Vector x = Widen(in);
  if (rows > cols) x = Transposed(x, rows, cols);
  const int64_t m = std::min(rows, cols);
  const int64_t n = std::max(rows, cols);
  double largest = 0;
  for (double v : x) largest = std::max(largest, std::fabs(v));
  if (largest == 0) return Vector(in.size(), 0.0);
  double square_sum = 0;
  for (double& v : x) v /= largest, square_sum += v * v;
  for (double& v : x) v /= std::sqrt(square_sum) + 1e-7;
  for (const auto& [a, b, c] : schedule) {
    const Vector gram = Multiply(x, Transposed(x, m, n), m, n, m);
    Vector polynomial = Multiply(gram, gram, m, m, m);
    for (size_t i = 0; i < gram.size(); ++i) polynomial[i] = b * gram[i] + c * polynomial[i];
    const Vector moved = Multiply(polynomial, x, m, m, n);
    for (size_t i = 0; i < x.size(); ++i) x[i] = a * x[i] + moved[i];
  }
  return rows > cols ? Transposed(x, m, n) : x;
}

// By power iteration.
inline double TopSingularValue(const std::vector<float>& x, int64_t rows, int64_t cols) {
  Vector v(static_cast<size_t>(cols), 1.0);
  double top = 0;
  for (int iteration = 0; iteration < 200; ++iteration) {
    double norm = 0;
    for (double value : v) norm += value * value;
    for (double& value : v) value /= std::sqrt(norm);
    Vector next(v.size(), 0.0);
    top = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double dot = 0;
      for (int64_t j = 0; j < cols; ++j)
        dot += x[static_cast<size_t>(i * cols + j)] * v[static_cast<size_t>(j)];
      top += dot * dot;
      for (int64_t j = 0; j < cols; ++j)
        next[static_cast<size_t>(j)] += dot * x[static_cast<size_t>(i * cols + j)];
    }
    top = std::sqrt(top);
    if (!(top > 0) || !std::isfinite(top)) return top;
    v = std::move(next);
  }
  return top;
}

// Rows orthonormal.
inline Vector Orthonormal(int64_t rows, int64_t cols, uint32_t seed) {
  const std::vector<float> start = Gaussian(static_cast<size_t>(rows * cols), seed);
  Vector q = Widen(start);
  for (int64_t i = 0; i < rows; ++i) {
    double* v = &q[static_cast<size_t>(i * cols)];
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < i; ++j) {
        const double* u = &q[static_cast<size_t>(j * cols)];
        double dot = 0;
        for (int64_t k = 0; k < cols; ++k) dot += u[k] * v[k];
        for (int64_t k = 0; k < cols; ++k) v[k] -= dot * u[k];
      }
    }
    double norm = 0;
    for (int64_t k = 0; k < cols; ++k) norm += v[k] * v[k];
    for (int64_t k = 0; k < cols; ++k) v[k] /= std::sqrt(norm);
  }
  return q;
}

// rows <= cols, with these singular values.
inline std::vector<float> WithSpectrum(int64_t rows, int64_t cols, const Vector& sigma,
                                       uint32_t seed) {
  const Vector u = Orthonormal(rows, rows, seed);
  Vector v = Orthonormal(rows, cols, seed + 1);
  for (int64_t s = 0; s < rows; ++s) {
    for (int64_t j = 0; j < cols; ++j)
      v[static_cast<size_t>(s * cols + j)] *= sigma[static_cast<size_t>(s)];
  }
  const Vector x = Multiply(Transposed(u, rows, rows), v, rows, rows, cols);
  return std::vector<float>(x.begin(), x.end());
}

}  // namespace dmuon::cuda::reference

#endif  // DMUON_TESTS_CUDA_REFERENCE_H_
