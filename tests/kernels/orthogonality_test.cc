// The estimate of a block's orthogonality error, held against the error itself.
#include "kernels/cpu/orthogonality.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "kernels/ops/backend.h"
#include "tests/kernels/spectra.h"

namespace dmuon::kernels {
namespace {

using reference::Matrix;

constexpr uint64_t kSeed = 11;

// ||O O^T - I||_F / sqrt(m), in float64; O^T O for a tall O.
double Error(const Matrix<float>& o) {
  const bool tall = o.rows > o.cols;
  const int64_t m = std::min(o.rows, o.cols), n = std::max(o.rows, o.cols);
  double square = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      double product = i == j ? -1 : 0;
      for (int64_t k = 0; k < n; ++k) {
        product += tall ? double{o(k, i)} * o(k, j) : double{o(i, k)} * o(j, k);
      }
      square += product * product;
    }
  }
  return std::sqrt(square / static_cast<double>(m));
}

double Estimate(const Matrix<float>& o) {
  const cpu::KernelTable& kernels = **cpu::FindKernels("");
  return std::sqrt(cpu::SampledOrthogonality(kernels, o.values.data(), o.rows, o.cols));
}

Matrix<float> NewtonSchulzOf(Backend& backend, const Matrix<float>& in) {
  const auto plan = PlanNewtonSchulz(backend, {}, in.rows, in.cols);
  EXPECT_TRUE(plan.ok()) << plan.status();
  void* workspace = *backend.Allocate((*plan)->workspace_bytes());
  Matrix<float> out(in.rows, in.cols);
  (*plan)->Run({}, in.values.data(), out.values.data(), workspace);
  backend.Free(workspace);
  return out;
}

TEST(SampledOrthogonality, IsTheErrorItselfUpToEightRows) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 300}, {300, 1}, {8, 8}, {7, 200}, {200, 7}}) {
    const Matrix<float> o = reference::Gaussian(rows, cols, kSeed);
    EXPECT_NEAR(Estimate(o), Error(o), 1e-5 * Error(o)) << rows << " x " << cols;
  }
}

// A sample of k of m rows: what is noisy are the products of different rows, of which there are k (k - 1) / 2, and where
// some rows are zero and others not, how many of either are in it.
TEST(SampledOrthogonality, IsNearTheErrorOfWhatNewtonSchulzMakesOfEverySpectrum) {
  constexpr double kZeroRowsBound = 0.35;
  const auto backend = *CreateBackend("cpu", 2);
  const struct {
    int64_t rows, cols;
    double bound;  // of |estimate / error - 1|
  } kShapes[] = {
      {64, 64, 0.35}, {64, 768, 0.35}, {768, 64, 0.35}, {256, 256, 0.1}, {384, 480, 0.1}};
  for (const auto& [rows, cols, bound] : kShapes) {
    for (const reference::Spectrum& spectrum : reference::AllSpectra(rows, cols, kSeed)) {
      const Matrix<float> o = NewtonSchulzOf(*backend, spectrum.matrix);
      const double error = Error(o), estimate = Estimate(o);
      const double allowed = spectrum.name == "zero rows" ? kZeroRowsBound : bound;
      std::printf("  %3d x %3d  %-22s error %.3f  estimate %.3f  off by %.2f  bound %.2f\n",
                  static_cast<int>(rows), static_cast<int>(cols), spectrum.name.c_str(), error,
                  estimate, std::fabs(estimate / error - 1), allowed);
      EXPECT_LE(std::fabs(estimate / error - 1), allowed)
          << rows << " x " << cols << ", " << spectrum.name;
    }
  }
}

TEST(SampledOrthogonality, TellsAnOrthogonalMatrixFromOneOfLowRank) {
  const Matrix<float> orthogonal =
      reference::WithSingularValues(128, 512, std::vector<double>(128, 1), kSeed);
  EXPECT_LE(Estimate(orthogonal), 1e-5);
  const Matrix<float> low = reference::WithSingularValues(128, 512, {1, 1, 1, 1}, kSeed);
  EXPECT_NEAR(Estimate(low), 1, 0.1);
}

TEST(SampledOrthogonality, LetsNanThrough) {
  Matrix<float> o(8, 16);
  o(3, 5) = NAN;
  EXPECT_TRUE(std::isnan(Estimate(o)));
}

}  // namespace
}  // namespace dmuon::kernels
