#include "tests/kernels/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace dmuon::kernels::reference {
namespace {

Matrix<double> Transposed(const Matrix<double>& x) {
  Matrix<double> t(x.cols, x.rows);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; ++j) t(j, i) = x(i, j);
  }
  return t;
}

// out += a b, blocked so that the stretch of b in use stays in the cache.
void MultiplyAdd(const Matrix<double>& a, const Matrix<double>& b, Matrix<double>& out) {
  constexpr int64_t kBlock = 64;
  for (int64_t k0 = 0; k0 < a.cols; k0 += kBlock) {
    const int64_t k1 = std::min(a.cols, k0 + kBlock);
    for (int64_t j0 = 0; j0 < b.cols; j0 += 4 * kBlock) {
      const int64_t j1 = std::min(b.cols, j0 + 4 * kBlock);
      for (int64_t i = 0; i < a.rows; ++i) {
        double* to = &out.values[i * out.cols];
        for (int64_t k = k0; k < k1; ++k) {
          const double left = a(i, k);
          const double* right = &b.values[k * b.cols];
          for (int64_t j = j0; j < j1; ++j) to[j] += left * right[j];
        }
      }
    }
  }
}

}  // namespace

Matrix<double> NewtonSchulz(const Matrix<float>& in, absl::Span<const Coefficients> schedule) {
  const bool tall = in.rows > in.cols;
  Matrix<double> x(in.rows, in.cols);
  double magnitude = 0, square_sum = 0;
  for (float value : in.values)
    magnitude = std::max(magnitude, std::fabs(static_cast<double>(value)));
  if (magnitude == 0) return x;
  for (size_t i = 0; i < in.values.size(); ++i) {
    x.values[i] = in.values[i] / magnitude;
    square_sum += x.values[i] * x.values[i];
  }
  for (double& value : x.values) value /= std::sqrt(square_sum) + 1e-7;
  if (tall) x = Transposed(x);
  for (const auto& [a, b, c] : schedule) {
    Matrix<double> gram(x.rows, x.rows);
    MultiplyAdd(x, Transposed(x), gram);
    Matrix<double> update(x.rows, x.rows);
    MultiplyAdd(gram, gram, update);
    for (size_t i = 0; i < update.values.size(); ++i) {
      update.values[i] = c * update.values[i] + b * gram.values[i];
    }
    Matrix<double> next(x.rows, x.cols);
    MultiplyAdd(update, x, next);
    for (size_t i = 0; i < next.values.size(); ++i) next.values[i] += a * x.values[i];
    x = std::move(next);
  }
  return tall ? Transposed(x) : x;
}

double RelativeError(const Matrix<float>& x, const Matrix<double>& exact) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.values.size(); ++i) {
    const double d = x.values[i] - exact.values[i];
    difference += d * d;
    norm += exact.values[i] * exact.values[i];
  }
  const double error = std::sqrt(difference / norm);
  return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
}

double TopSingularValue(const Matrix<float>& x) {
  constexpr int kIterations = 100;
  std::vector<double> v(x.cols), next(x.cols);
  for (int64_t j = 0; j < x.cols; ++j) v[j] = 1 + 0.5 * std::sin(static_cast<double>(j));
  double top = 0;
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    double norm = 0;
    for (double value : v) norm += value * value;
    if (norm == 0) return 0;
    for (double& value : v) value /= std::sqrt(norm);
    std::fill(next.begin(), next.end(), 0);
    double square = 0;
    for (int64_t i = 0; i < x.rows; ++i) {
      double dot = 0;
      for (int64_t j = 0; j < x.cols; ++j) dot += x(i, j) * v[j];
      square += dot * dot;
      for (int64_t j = 0; j < x.cols; ++j) next[j] += dot * x(i, j);
    }
    top = std::sqrt(square);
    if (!std::isfinite(top)) return std::numeric_limits<double>::infinity();
    std::swap(v, next);
  }
  return top;
}

}  // namespace dmuon::kernels::reference
