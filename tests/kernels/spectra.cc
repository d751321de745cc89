#include "tests/kernels/spectra.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "kernels/newton_schulz/coefficients.h"

namespace dmuon::kernels::reference {
namespace {

// Box-Muller over mt19937_64, whose numbers the standard fixes; std::normal_distribution's it does not.
class Normal {
 public:
  explicit Normal(uint64_t seed) : generator_(seed) {}
  double operator()() {
    const double u = (static_cast<double>(generator_() >> 11) + 1) * 0x1p-53;
    const double v = static_cast<double>(generator_() >> 11) * 0x1p-53;
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
  }

 private:
  std::mt19937_64 generator_;
};

// `count` orthonormal vectors of `size`, by Gram-Schmidt done twice.
std::vector<std::vector<double>> Orthonormal(int64_t count, int64_t size, uint64_t seed) {
  Normal normal(seed);
  std::vector<std::vector<double>> basis;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<double> v(size);
    for (double& value : v) value = normal();
    for (int pass = 0; pass < 2; ++pass) {
      for (const std::vector<double>& u : basis) {
        double dot = 0;
        for (int64_t k = 0; k < size; ++k) dot += u[k] * v[k];
        for (int64_t k = 0; k < size; ++k) v[k] -= dot * u[k];
      }
    }
    double norm = 0;
    for (double value : v) norm += value * value;
    for (double& value : v) value /= std::sqrt(norm);
    basis.push_back(std::move(v));
  }
  return basis;
}

// An orthogonal matrix that is quickly applied: random signs, Walsh-Hadamard, and a reflection, which takes away the
// regularity of the former.
struct Mixer {
  Mixer(int64_t size, uint64_t seed) : signs(size), mirror(size) {
    Normal normal(seed);
    double norm = 0;
    for (int64_t i = 0; i < size; ++i) {
      signs[i] = normal() < 0 ? -1 : 1;
      mirror[i] = normal();
      norm += mirror[i] * mirror[i];
    }
    for (double& value : mirror) value /= std::sqrt(norm);
  }

  // x = (this) x, from the left.
  void Apply(Matrix<double>& x) const {
    const int64_t n = x.rows, cols = x.cols;
    for (int64_t i = 0; i < n; ++i) {
      const double factor = signs[i] / std::sqrt(static_cast<double>(n));
      for (int64_t j = 0; j < cols; ++j) x(i, j) *= factor;
    }
    for (int64_t half = 1; half < n; half *= 2) {
      for (int64_t i = 0; i < n; ++i) {
        if ((i & half) != 0) continue;
        double* a = &x.values[i * cols];
        double* b = &x.values[(i + half) * cols];
        for (int64_t j = 0; j < cols; ++j) {
          const double sum = a[j] + b[j];
          b[j] = a[j] - b[j];
          a[j] = sum;
        }
      }
    }
    std::vector<double> along(cols);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < cols; ++j) along[j] += 2 * mirror[i] * x(i, j);
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < cols; ++j) x(i, j) -= mirror[i] * along[j];
    }
  }

  std::vector<double> signs, mirror;
};

Matrix<double> Transposed(const Matrix<double>& x) {
  constexpr int64_t kBlock = 32;
  Matrix<double> t(x.cols, x.rows);
  for (int64_t i0 = 0; i0 < x.rows; i0 += kBlock) {
    for (int64_t j = 0; j < x.cols; ++j) {
      for (int64_t i = i0; i < std::min(x.rows, i0 + kBlock); ++i) t(j, i) = x(i, j);
    }
  }
  return t;
}

// left diag(values) right^T
Matrix<double> Mixed(const Mixer& left, const std::vector<double>& values, const Mixer& right) {
  Matrix<double> x(static_cast<int64_t>(right.signs.size()),
                   static_cast<int64_t>(left.signs.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    x(static_cast<int64_t>(i), static_cast<int64_t>(i)) = values[i];
  }
  right.Apply(x);
  x = Transposed(x);
  left.Apply(x);
  return x;
}

}  // namespace

Known WithKnownResult(int64_t rows, int64_t cols, const std::vector<double>& values,
                      absl::Span<const Coefficients> schedule, uint64_t seed) {
  const Mixer left(rows, seed), right(cols, seed + 1);
  double square_sum = 0;
  for (double value : values) square_sum += value * value;
  std::vector<double> results;
  for (double value : values) results.push_back(Evaluate(schedule, value / std::sqrt(square_sum)));
  Known known{Matrix<float>(rows, cols), Mixed(left, results, right)};
  const Matrix<double> in = Mixed(left, values, right);
  std::copy(in.values.begin(), in.values.end(), known.in.values.begin());
  return known;
}

Matrix<float> Gaussian(int64_t rows, int64_t cols, uint64_t seed) {
  Normal normal(seed);
  Matrix<float> x(rows, cols);
  for (float& value : x.values) value = static_cast<float>(normal());
  return x;
}

Matrix<float> WithSingularValues(int64_t rows, int64_t cols, const std::vector<double>& values,
                                 uint64_t seed) {
  const int64_t rank = std::min<int64_t>({rows, cols, static_cast<int64_t>(values.size())});
  const auto left = Orthonormal(rank, rows, seed), right = Orthonormal(rank, cols, seed + 1);
  Matrix<double> sum(rows, cols);
  for (int64_t s = 0; s < rank; ++s) {
    for (int64_t i = 0; i < rows; ++i) {
      const double scaled = values[s] * left[s][i];
      for (int64_t j = 0; j < cols; ++j) sum(i, j) += scaled * right[s][j];
    }
  }
  Matrix<float> x(rows, cols);
  std::copy(sum.values.begin(), sum.values.end(), x.values.begin());
  return x;
}

std::vector<Spectrum> AllSpectra(int64_t rows, int64_t cols, uint64_t seed) {
  const int64_t m = std::min(rows, cols);
  const auto with = [&](auto value_of) {
    std::vector<double> values;
    for (int64_t i = 0; i < m; ++i) values.push_back(value_of(i));
    return WithSingularValues(rows, cols, values, seed);
  };
  const auto fraction = [m](int64_t i) { return m == 1 ? 0.0 : static_cast<double>(i) / (m - 1); };
  const auto scaled = [&](float factor) {
    Matrix<float> x = Gaussian(rows, cols, seed);
    for (float& value : x.values) value *= factor;
    return x;
  };
  Matrix<float> zero_rows = Gaussian(rows, cols, seed);
  for (int64_t i = 0; i < rows; i += 3) {
    for (int64_t j = 0; j < cols; ++j) zero_rows(i, j) = 0;
  }
  return {
      {"gaussian", Gaussian(rows, cols, seed)},
      {"log-uniform to 1e4", with([&](int64_t i) { return std::pow(10, -4 * fraction(i)); })},
      {"log-uniform to 1e8", with([&](int64_t i) { return std::pow(10, -8 * fraction(i)); })},
      {"power law 1/i", with([](int64_t i) { return 1.0 / static_cast<double>(i + 1); })},
      {"one large, many tiny", with([](int64_t i) { return i == 0 ? 1.0 : 1e-3; })},
      {"rank 1", with([](int64_t i) { return i == 0 ? 1.0 : 0.0; })},
      {"rank 8", with([](int64_t i) { return i < 8 ? 1.0 / static_cast<double>(i + 1) : 0.0; })},
      {"repeated", with([](int64_t) { return 1.0; })},
      {"zero rows", std::move(zero_rows)},
      {"entries 1e-30", scaled(1e-30f)},
      {"entries 1e30", scaled(1e30f)},
      {"zero", Matrix<float>(rows, cols)},
  };
}

}  // namespace dmuon::kernels::reference
