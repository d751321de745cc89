// The tables of docs/numerics.md, held by every kernel that this processor runs, each forced in turn. Errors are printed
// beside their bounds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/newton_schulz/coefficients.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/runner.h"
#include "tests/kernels/spectra.h"

namespace dmuon::kernels {
namespace {

constexpr size_t kModeCount = std::size(kModes);

std::string Title(const std::string& what, const Mode& mode) {
  return absl::StrCat(what, mode.form == NsForm::kGram ? ", gram " : ", direct ", Name(mode.dtype));
}

INSTANTIATE_TEST_SUITE_P(Cpu, EachKernel, ForcedKernels(), KernelOf);

TEST_P(EachKernel, GaussianErrorStaysWithinItsBoundOnEveryShape) {
  constexpr int64_t kSides[] = {1, 2, 7, 8, 9, 64, 127, 129, 512, 2048};
  const std::vector<Coefficients> schedule = Schedule({});
  Worst worst[kModeCount];
  for (int64_t rows : kSides) {
    for (int64_t cols : kSides) {
      if (rows >= 512 && cols >= 512) continue;  // the float64 reference takes too long: below
      const Matrix<float> in = reference::Gaussian(rows, cols, kSeed + rows * 10000 + cols);
      const Matrix<double> exact = reference::NewtonSchulz(in, schedule);
      for (size_t i = 0; i < kModeCount; ++i) {
        const double error =
            reference::RelativeError(runner_.Run(OptionsFor(kModes[i]), in), exact);
        worst[i].Note(error, absl::StrCat(Shape(in), ", ", runner_.kernel()));
        EXPECT_LE(error, kModes[i].error_bound) << Shape(in) << " " << runner_.kernel();
      }
    }
  }
  for (size_t i = 0; i < kModeCount; ++i)
    worst[i].Print(Title("gaussian", kModes[i]), kModes[i].error_bound);
}

// Singular values as a Gaussian matrix has them (Marchenko-Pastur, nearly: a quarter of a circle), so that the bounds of
// the table above are asked for.
std::vector<double> LikeGaussian(int64_t m, int64_t n) {
  const double ratio = std::sqrt(static_cast<double>(m) / static_cast<double>(n));
  std::vector<double> values;
  for (int64_t i = 0; i < m; ++i) {
    const double part = (static_cast<double>(i) + 0.5) / static_cast<double>(m);
    values.push_back(1 + ratio * (1 - 2 * part));
  }
  return values;
}

TEST_P(EachKernel, LargeShapesStayWithinTheSameBounds) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {
      {512, 512}, {512, 2048}, {2048, 512}, {2048, 2048}, {64, 4096}};
  const std::vector<Coefficients> schedule = Schedule({});
  for (const auto& [rows, cols] : kShapes) {
    // Half a minute of multiplications, in the same code as on the others.
    if (rows * cols == 2048 * 2048 && GetParam() == "portable") continue;
    const reference::Known known = reference::WithKnownResult(
        rows, cols, LikeGaussian(std::min(rows, cols), std::max(rows, cols)), schedule, kSeed);
    for (const Mode& mode : kModes) {
      if (rows == cols && mode.form == NsForm::kGram) continue;  // runs direct on squares
      const double error =
          reference::RelativeError(runner_.Run(OptionsFor(mode), known.in), known.exact);
      EXPECT_LE(error, mode.error_bound) << Shape(known.in) << " " << runner_.kernel();
      std::printf("  large %-12s %-34s error %.2e  bound %.0e\n", Shape(known.in).c_str(),
                  runner_.kernel().c_str(), error, mode.error_bound);
    }
  }
}

TEST_P(EachKernel, NoSpectrumLiftsTheTopSingularValueAboveItsBound) {
  const std::vector<Coefficients> schedule = Schedule({});
  const double maximum = Maximum(schedule);
  constexpr std::pair<int64_t, int64_t> kShapes[] = {
      {1, 64},  {2, 2},     {7, 448},   {8, 9},     {9, 8},   {64, 64},  {64, 512},
      {96, 96}, {127, 129}, {129, 127}, {129, 256}, {512, 8}, {2048, 32}};
  std::map<std::pair<std::string, size_t>, Worst> tops;
  for (const auto& [rows, cols] : kShapes) {
    for (const auto& [name, in] : reference::AllSpectra(rows, cols, kSeed)) {
      for (size_t i = 0; i < kModeCount; ++i) {
        const Matrix<float> out = runner_.Run(OptionsFor(kModes[i]), in);
        const double top = reference::TopSingularValue(out);
        EXPECT_LE(top, maximum + kModes[i].overshoot_bound)
            << name << " " << Shape(in) << " " << runner_.kernel();
        if (name == "zero") {
          EXPECT_EQ(top, 0) << runner_.kernel();
        }
        tops[{name, i}].Note(top, absl::StrCat(Shape(in), ", ", runner_.kernel()));
      }
    }
  }
  EXPECT_EQ(tops.size(), 12 * kModeCount);
  std::printf("  largest singular value of the result\n");
  for (const auto& [key, top] : tops)
    top.Print(Title(key.first, kModes[key.second]), maximum + kModes[key.second].overshoot_bound);
}

TEST_P(EachKernel, HardSpectraStayWithinTheirBoundsOnLargeShapesToo) {
  const std::vector<Coefficients> schedule = Schedule({});
  const double maximum = Maximum(schedule);
  constexpr int64_t kRows = 128, kCols = 8192;  // aspect 64
  std::vector<double> log_uniform, power_law, spike;
  for (int64_t i = 0; i < kRows; ++i) {
    log_uniform.push_back(std::pow(10, -8 * static_cast<double>(i) / (kRows - 1)));
    power_law.push_back(1 / static_cast<double>(i + 1));
    spike.push_back(i == 0 ? 1 : 1e-3);
  }
  for (const auto& [name, values] : {std::pair{"log-uniform to 1e8", log_uniform},
                                     {"power law 1/i", power_law},
                                     {"one large, many tiny", spike}}) {
    const reference::Known known =
        reference::WithKnownResult(kRows, kCols, values, schedule, kSeed);
    for (const Mode& mode : kModes) {
      const Matrix<float> out = runner_.Run(OptionsFor(mode), known.in);
      const double top = reference::TopSingularValue(out);
      const double bound = maximum + mode.overshoot_bound;
      EXPECT_LE(top, bound) << name << " " << runner_.kernel();
      std::printf("  %-22s %-12s %-34s top %.4f  bound %.4f  error %.1e\n", name,
                  Shape(known.in).c_str(), runner_.kernel().c_str(), top, bound,
                  reference::RelativeError(out, known.exact));
    }
  }
}

TEST_P(EachKernel, TheTransposedInputGivesTheTransposedResult) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{64, 64}, {70, 300}, {9, 512}}) {
    const Matrix<float> in = reference::Gaussian(rows, cols, kSeed);
    Matrix<float> turned(cols, rows);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) turned(j, i) = in(i, j);
    }
    for (const Mode& mode : kModes) {
      const Matrix<float> out = runner_.Run(OptionsFor(mode), in);
      const Matrix<float> back = runner_.Run(OptionsFor(mode), turned);
      Matrix<double> expected(cols, rows);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) expected(j, i) = out(i, j);
      }
      EXPECT_LE(reference::RelativeError(back, expected), mode.error_bound)
          << Shape(in) << " " << runner_.kernel();
    }
  }
}

}  // namespace
}  // namespace dmuon::kernels
