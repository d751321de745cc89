#include "kernels/newton_schulz/restarts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "kernels/newton_schulz/coefficients.h"
#include "kernels/newton_schulz/iteration.h"

namespace dmuon::kernels {
namespace {

constexpr int kSize = 64;
using Matrix = std::vector<float>;  // kSize x kSize

float Rounded(float x, Dtype dtype) {
  if (dtype == Dtype::kF32 || !std::isfinite(x)) return x;
  const int drop = dtype == Dtype::kBF16 ? 16 : 13;  // mantissa bits that the dtype lacks
  if (dtype == Dtype::kF16) {
    if (std::fabs(x) < 0x1p-14f) return std::nearbyint(x * 0x1p24f) * 0x1p-24f;
    if (std::fabs(x) >= 65520.f) return std::copysign(std::numeric_limits<float>::infinity(), x);
  }
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits += (1u << (drop - 1)) - 1 + ((bits >> drop) & 1);
  bits &= ~((1u << drop) - 1);
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// out = alpha a b + beta e, rounded once.
void Product(double alpha, const Matrix& a, const Matrix& b, double beta, const Matrix* e,
             Dtype dtype, Matrix& out) {
  const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
  for (int i = 0; i < kSize; ++i) {
    float row[kSize] = {};
    for (int k = 0; k < kSize; ++k) {
      const float left = a[i * kSize + k];
      for (int j = 0; j < kSize; ++j) row[j] += left * b[k * kSize + j];
    }
    for (int j = 0; j < kSize; ++j) {
      const float add = e == nullptr ? 0 : fb * (*e)[i * kSize + j];
      out[i * kSize + j] = Rounded(fa * row[j] + add, dtype);
    }
  }
}

// Plain loops in the arithmetic of one dtype: what a backend does, small.
class TrialOps final : public MatrixOps {
 public:
  TrialOps(Matrix x, Dtype dtype) : x_(std::move(x)), dtype_(dtype) {
    for (float& value : x_) value = Rounded(value, dtype_);
    for (Matrix& slot : slots_) slot.resize(kSize * kSize);
  }

  void Gram(int r) override {
    Matrix transposed(kSize * kSize);
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < kSize; ++j) transposed[j * kSize + i] = x_[i * kSize + j];
    }
    Product(1, x_, transposed, 0, nullptr, dtype_, slots_[r]);
    Mirror(slots_[r]);
  }
  void Multiply(int out, double alpha, int left, int right, double beta, int e) override {
    Matrix product(kSize * kSize);
    Product(alpha, slots_[left], slots_[right], beta, &slots_[e], dtype_, product);
    Mirror(product);
    slots_[out] = std::move(product);
  }
  void AddIdentity(int out, int z, double a) override {
    slots_[out] = slots_[z];
    for (int i = 0; i < kSize; ++i) {
      float& diagonal = slots_[out][i * kSize + i];
      diagonal = Rounded(diagonal + static_cast<float>(a), dtype_);
    }
  }
  void Apply(int q, double a, bool) override {
    Matrix product(kSize * kSize);
    Product(1, slots_[q], x_, a, &x_, dtype_, product);
    x_ = std::move(product);
  }

  const Matrix& x() const { return x_; }

 private:
  static void Mirror(Matrix& m) {
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < i; ++j) m[i * kSize + j] = m[j * kSize + i];
    }
  }

  Matrix x_;
  Dtype dtype_;
  Matrix slots_[kSymmetricSlots];
};

// Columns orthonormal: Gram-Schmidt, twice for accuracy, on a fixed pseudo-random matrix.
std::vector<double> Orthogonal(uint64_t seed) {
  std::vector<double> q(kSize * kSize);  // row i = vector i
  for (double& value : q) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    value = static_cast<double>(seed >> 11) / (1ull << 53) - 0.5;
  }
  for (int i = 0; i < kSize; ++i) {
    double* v = &q[i * kSize];
    for (int pass = 0; pass < 2; ++pass) {
      for (int j = 0; j < i; ++j) {
        const double* u = &q[j * kSize];
        double dot = 0;
        for (int k = 0; k < kSize; ++k) dot += u[k] * v[k];
        for (int k = 0; k < kSize; ++k) v[k] -= dot * u[k];
      }
    }
    double norm = 0;
    for (int k = 0; k < kSize; ++k) norm += v[k] * v[k];
    for (int k = 0; k < kSize; ++k) v[k] /= std::sqrt(norm);
  }
  return q;
}

// Given singular values, Frobenius norm 1.
Matrix WithSpectrum(double (*sigma_at)(int)) {
  const std::vector<double> u = Orthogonal(1), v = Orthogonal(2);
  std::vector<double> x(kSize * kSize);
  double square_sum = 0;
  for (int s = 0; s < kSize; ++s) {
    const double sigma = sigma_at(s);
    square_sum += sigma * sigma;
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < kSize; ++j)
        x[i * kSize + j] += sigma * u[s * kSize + i] * v[s * kSize + j];
    }
  }
  Matrix result(kSize * kSize);
  for (int i = 0; i < kSize * kSize; ++i)
    result[i] = static_cast<float>(x[i] / std::sqrt(square_sum));
  return result;
}

// What one spectrum forgives another does not: in bf16 with the default set, [2] leaves 1.2 on the first and 1.6 on the
// second, [3] leaves 1.1 on both and explodes on the third.
std::vector<Matrix> HardMatrices() {
  return {
      WithSpectrum([](int s) { return std::pow(10, -10.0 * s / (kSize - 1)); }),
      WithSpectrum([](int s) { return std::pow(10, -4.0 * s / (kSize - 1)); }),
      WithSpectrum([](int s) { return 1.0 / (s + 1); }),
  };
}

// By power iteration on X^T X.
double TopSingularValue(const Matrix& x) {
  constexpr int kIterations = 300;
  std::vector<double> v(kSize, 1), w(kSize);
  double top = 0;
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    double norm = 0;
    for (double value : v) norm += value * value;
    for (double& value : v) value /= std::sqrt(norm);
    std::vector<double> next(kSize, 0);
    double square = 0;
    for (int i = 0; i < kSize; ++i) {
      double dot = 0;
      for (int j = 0; j < kSize; ++j) dot += x[i * kSize + j] * v[j];
      square += dot * dot;
      for (int j = 0; j < kSize; ++j) next[j] += dot * x[i * kSize + j];
    }
    top = std::sqrt(square);
    if (!std::isfinite(top)) return std::numeric_limits<double>::infinity();
    if (top == 0) return 0;
    v = std::move(next);
  }
  return top;
}

// docs/numerics.md, "Accuracy to hold": how far the top singular value may exceed the polynomial's maximum.
double Allowance(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return 0.005;
    case Dtype::kF16: return 0.05;
    case Dtype::kBF16: return 0.2;
  }
  return 0;
}

std::vector<int> Search(absl::Span<const Coefficients> schedule, Dtype dtype) {
  const double bound = Maximum(schedule) + Allowance(dtype);
  const int steps = static_cast<int>(schedule.size());
  std::vector<int> best;
  double best_top = TrialTopSingularValue(schedule, {}, dtype);
  const auto consider = [&](std::vector<int> candidate) {
    const double top = TrialTopSingularValue(schedule, candidate, dtype);
    if (top < best_top) best_top = top, best = std::move(candidate);
  };
  if (best_top <= bound) return best;
  for (int i = 1; i < steps; ++i) consider({i});
  if (best_top <= bound) return best;
  for (int i = 1; i < steps; ++i) {
    for (int j = i + 1; j < steps; ++j) consider({i, j});
  }
  if (best_top <= bound) return best;
  // Many steps in a narrow dtype: start anew as often as it takes.
  for (int every = 3; every >= 1; --every) {
    std::vector<int> candidate;
    for (int i = every; i < steps; i += every) candidate.push_back(i);
    consider(std::move(candidate));
    if (best_top <= bound) break;
  }
  return best;
}

absl::Status Try(absl::Span<const Coefficients> schedule, absl::Span<const int> restarts,
                 Dtype dtype) {
  const int steps = static_cast<int>(schedule.size());
  int previous = 0;
  for (int position : restarts) {
    if (position <= previous || position >= steps) {
      return absl::InvalidArgumentError(
          absl::StrCat("Newton-Schulz restarts: expected ascending positions from 1 to ", steps - 1,
                       ", given [", absl::StrJoin(restarts, ", "), "]"));
    }
    previous = position;
  }
  const double top = TrialTopSingularValue(schedule, restarts, dtype);
  const double maximum = Maximum(schedule);
  if (!(top <= maximum + 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Newton-Schulz restarts [", absl::StrJoin(restarts, ", "), "] explode in ", Name(dtype),
        " with ", steps, " steps: a hard spectrum ends with a singular value of ", top,
        ", expected about ", maximum));
  }
  return absl::OkStatus();
}

// Answers of functions that take long. Thread-safe.
template <typename Key, typename Value>
class Remembered {
 public:
  template <typename F>
  Value Get(Key key, F compute) {
    absl::MutexLock lock(&mutex_);
    const auto found = known_.find(key);
    if (found != known_.end()) return found->second;
    Value value = compute();
    constexpr size_t kMaxKnown = 256;  // options come from clients
    if (known_.size() < kMaxKnown) known_.emplace(std::move(key), value);
    return value;
  }

 private:
  absl::Mutex mutex_;
  std::map<Key, Value> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

double TrialTopSingularValue(absl::Span<const Coefficients> schedule,
                             absl::Span<const int> restarts, Dtype dtype) {
  static const auto* const hard = new std::vector<Matrix>(HardMatrices());
  double top = 0;
  for (const Matrix& matrix : *hard) {
    TrialOps ops(matrix, dtype);
    IterateGram(schedule, restarts, ops);
    top = std::max(top, TopSingularValue(ops.x()));
  }
  return top;
}

std::vector<int> DeriveRestarts(absl::Span<const Coefficients> schedule, Dtype dtype) {
  using Key = std::pair<std::vector<Coefficients>, Dtype>;
  static auto* const known = new Remembered<Key, std::vector<int>>();
  return known->Get({{schedule.begin(), schedule.end()}, dtype},
                    [&] { return Search(schedule, dtype); });
}

absl::Status CheckRestarts(absl::Span<const Coefficients> schedule, absl::Span<const int> restarts,
                           Dtype dtype) {
  using Key = std::tuple<std::vector<Coefficients>, std::vector<int>, Dtype>;
  static auto* const known = new Remembered<Key, absl::Status>();
  return known->Get({{schedule.begin(), schedule.end()}, {restarts.begin(), restarts.end()}, dtype},
                    [&] { return Try(schedule, restarts, dtype); });
}

std::vector<int> Restarts(const NewtonSchulzOptions& options, Dtype dtype) {
  if (options.restarts.has_value()) return *options.restarts;
  return DeriveRestarts(Schedule(options), dtype);
}

}  // namespace dmuon::kernels
