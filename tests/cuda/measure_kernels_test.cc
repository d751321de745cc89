// What a step measures of its blocks, against float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ops/orthogonality_sample.h"
#include "tests/cuda/device.h"
#include "tests/cuda/reference.h"

namespace dmuon::cuda {
namespace {

using kernels::MuonCommitArgs;
using kernels::OrthogonalityArgs;
using kernels::OrthogonalitySample;
using reference::Gaussian;

const auto* const g_coverage =
    testing::AddGlobalTestEnvironment(new KernelCoverage({"OrthogonalityKernel"}));

class MeasureKernelsTest : public DeviceTest {
 protected:
  double Estimate(const std::vector<float>& matrix, int64_t rows, int64_t cols, size_t shift = 0) {
    OrthogonalityArgs args;
    args.orthogonal = OnDevice(matrix, shift);
    args.rows = rows;
    args.cols = cols;
    args.square_errors = static_cast<double*>(Bytes(sizeof(double)));
    backend().Orthogonality(stream(), args);
    return ToHost(args.square_errors, 1)[0];
  }
};

double Reference(const std::vector<float>& matrix, int64_t rows, int64_t cols) {
  const OrthogonalitySample sample(rows, cols);
  const int64_t length = std::max(rows, cols);
  const auto at = [&](int64_t i, int64_t k) -> double {
    const int64_t row = sample.at[i];
    return matrix[static_cast<size_t>(rows > cols ? k * cols + row : row * cols + k)];
  };
  double error = 0;
  for (int64_t i = 0; i < sample.count; ++i) {
    for (int64_t j = i; j < sample.count; ++j) {
      double product = 0;
      for (int64_t k = 0; k < length; ++k) product += at(i, k) * at(j, k);
      error += i == j ? sample.on_diagonal * (product - 1) * (product - 1)
                      : sample.beside_it * product * product;
    }
  }
  return error;
}

struct Shape {
  int64_t rows, cols;
};
// Samples of 1, 3, 8, 9, 12, 16 and 32, whole groups of four and not; the longer side below and beyond a block's stride.
constexpr Shape kShapes[] = {{1, 1},      {1, 4097},  {4097, 1}, {3, 50},   {50, 3},
                             {64, 64},    {73, 90},   {90, 73},  {100, 70}, {128, 1030},
                             {1030, 128}, {300, 300}, {260, 520}};

TEST_F(MeasureKernelsTest, OrthogonalityIsThatOfTheSampleInFloat64) {
  for (const auto [rows, cols] : kShapes) {
    for (size_t shift : {0, 1}) {
      const std::vector<float> matrix = Gaussian(static_cast<size_t>(rows * cols), 5, 0.1);
      const double expected = Reference(matrix, rows, cols);
      EXPECT_NEAR(Estimate(matrix, rows, cols, shift), expected, 1e-12 * expected)
          << rows << " x " << cols;
    }
  }
}

TEST_F(MeasureKernelsTest, OrthogonalityRepeatsBitForBitAndLetsNaNThrough) {
  std::vector<float> matrix = Gaussian(128 * 1030, 5);
  const double first = Estimate(matrix, 128, 1030);
  EXPECT_EQ(Estimate(matrix, 128, 1030, 1), first);
  matrix[static_cast<size_t>(OrthogonalitySample(128, 1030).at[7] * 1030 + 1029)] =
      std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(Estimate(matrix, 128, 1030)));
}

TEST_F(MeasureKernelsTest, MuonCommitSumsTheSquaresOfWhatItSubtracts) {
  for (int64_t count : {1, 7, 4096, 4097, 20011}) {
    for (size_t shift : {0, 1}) {
      for (bool published : {false, true}) {
        const auto n = static_cast<size_t>(count);
        const std::vector<float> o = Gaussian(n, 4);
        MuonCommitArgs args;
        args.momentum = OnDevice(Gaussian(n, 1), shift);
        args.gradient = OnDevice(Gaussian(n, 2), shift);
        args.weight = OnDevice(Gaussian(n, 3), shift);
        args.orthogonal = OnDevice(o, shift);
        args.count = count;
        args.published = published ? Bytes((n + shift) * sizeof(float)) : nullptr;
        args.square_sums = static_cast<double*>(Bytes(sizeof(double)));
        backend().MuonCommit(stream(), args);
        double expected = 0;
        for (float x : o) expected += static_cast<double>(x) * x;
        EXPECT_NEAR(ToHost(args.square_sums, 1)[0], expected, 1e-13 * expected) << count;
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::cuda
