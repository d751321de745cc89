#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/cuda/device.h"
#include "tests/cuda/reference.h"

namespace dmuon::cuda {
namespace {

using kernels::AdamwArgs;
using kernels::LookaheadArgs;
using kernels::MeanArgs;
using kernels::MuonCommitArgs;
using reference::Gaussian;
using reference::RelativeError;
using reference::Vector;
using reference::Widen;

// Around a thread's four, a block's tile of 4096, and several blocks.
constexpr int64_t kCounts[] = {1, 3, 7, 257, 4095, 4096, 4097, 20011};
constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kBF16, Dtype::kF16};

const auto* const g_coverage = testing::AddGlobalTestEnvironment(new KernelCoverage(
    {"MeanKernel", "LookaheadKernel", "MuonCommitKernel", "AdamwKernel", "PublishKernel"}));

class StepKernelsTest : public DeviceTest {
 protected:
  struct MeanResult {
    std::vector<float> mean;
    double square_sum;
  };
  MeanResult RunMean(const std::vector<Encoded>& inputs, Dtype dtype, int64_t count, size_t shift,
                     const std::vector<float>& before) {
    std::vector<const void*> pointers;
    for (const Encoded& e : inputs) pointers.push_back(OnDevice(e.bytes, shift * ByteSize(dtype)));
    float* mean = OnDevice(before, shift);
    auto* square_sum = static_cast<double*>(Bytes(sizeof(double)));
    MeanArgs args;
    args.inputs = pointers;
    args.dtype = dtype;
    args.count = count;
    args.divisor = static_cast<float>(inputs.size());
    args.accumulate = true;
    args.mean = mean;
    args.square_sum = square_sum;
    backend().MeanOverRanks(stream(), args);
    MeanResult result;
    result.mean = ToHost(mean, static_cast<size_t>(count));
    result.square_sum = ToHost(square_sum, 1)[0];
    return result;
  }
};

TEST_F(StepKernelsTest, MeanAgreesWithFloat64AndItsSquaresAreSummedExactly) {
  for (Dtype dtype : kDtypes) {
    for (int64_t count : kCounts) {
      for (int ranks : {1, 3, 8}) {
        std::vector<Encoded> inputs;
        const std::vector<float> before = Gaussian(static_cast<size_t>(count), 99);
        Vector expected(static_cast<size_t>(count), 0.0);
        for (int r = 0; r < ranks; ++r) {
          inputs.push_back(
              Encode(Gaussian(static_cast<size_t>(count), 7 + static_cast<uint32_t>(r)), dtype));
          for (size_t i = 0; i < expected.size(); ++i)
            expected[i] += inputs.back().values[i] / ranks;
        }
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
        const MeanResult result = RunMean(inputs, dtype, count, 0, before);
        SCOPED_TRACE(testing::Message()
                     << Name(dtype).data() << " " << count << " elements of " << ranks << " ranks");
        EXPECT_LE(RelativeError(result.mean, expected), 3e-7);
        double squares = 0;
        for (float m : result.mean) squares += static_cast<double>(m) * m;
        EXPECT_NEAR(result.square_sum / squares, 1, 1e-13);
      }
    }
  }
}

TEST_F(StepKernelsTest, MeanHasTheSameBitsWhereverItsInputsLie) {
  for (Dtype dtype : kDtypes) {
    constexpr int64_t kCount = 20011;
    const std::vector<float> before = Gaussian(kCount, 1);
    const std::vector<Encoded> inputs = {Encode(Gaussian(kCount, 2), dtype),
                                         Encode(Gaussian(kCount, 3), dtype)};
    const MeanResult aligned = RunMean(inputs, dtype, kCount, 0, before);
    const MeanResult shifted = RunMean(inputs, dtype, kCount, 1, before);
    EXPECT_EQ(aligned.mean, shifted.mean);
    EXPECT_EQ(aligned.square_sum, shifted.square_sum);
  }
}

TEST_F(StepKernelsTest, MeanOfHugeGradientsHasAFiniteNormAndOfInfiniteOnesNot) {
  constexpr int64_t kCount = 5000;
  const std::vector<float> zeros(kCount, 0.0f);
  std::vector<float> huge(kCount, 1e30f);
  EXPECT_NEAR(RunMean({Encode(huge, Dtype::kF32)}, Dtype::kF32, kCount, 0, zeros).square_sum /
                  (kCount * 1e60),
              1, 1e-6);
  huge[4321] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(
      std::isinf(RunMean({Encode(huge, Dtype::kF32)}, Dtype::kF32, kCount, 0, zeros).square_sum));
  huge[17] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(
      std::isnan(RunMean({Encode(huge, Dtype::kF32)}, Dtype::kF32, kCount, 0, zeros).square_sum));
}

TEST_F(StepKernelsTest, MeanWithoutAccumulateForgetsWhatWasThere) {
  constexpr size_t kCount = 300;
  const std::vector<float> nan(kCount, std::numeric_limits<float>::quiet_NaN());
  for (Dtype dtype : kDtypes) {
    for (size_t shift : {0, 1}) {
      float* mean = OnDevice(nan, shift);
      const uint8_t* input =
          OnDevice(Encode(std::vector<float>(kCount, 3.0f), dtype).bytes, shift * ByteSize(dtype));
      const void* inputs[] = {input, input};
      MeanArgs args;
      args.inputs = inputs;
      args.dtype = dtype;
      args.count = kCount;
      args.divisor = 4;
      args.mean = mean;
      backend().MeanOverRanks(stream(), args);
      EXPECT_THAT(ToHost(mean, kCount), testing::Each(1.5f)) << Name(dtype).data();
    }
  }
}

TEST_F(StepKernelsTest, MoreRanksThanAKernelTakesAreRefusedAtSynchronize) {
  float* memory = OnDevice(std::vector<float>(4, 0.0f));
  const std::vector<const void*> inputs(1000, memory);
  MeanArgs args;
  args.inputs = inputs;
  args.count = 4;
  args.mean = memory;
  backend().MeanOverRanks(stream(), args);
  EXPECT_EQ(backend().Synchronize(stream()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(backend().Synchronize(stream()).ok());
}

TEST_F(StepKernelsTest, LookaheadAgreesWithFloat64) {
  for (int64_t count : kCounts) {
    for (bool nesterov : {false, true}) {
      for (size_t shift : {0, 1}) {
        const auto n = static_cast<size_t>(count);
        const std::vector<float> m = Gaussian(n, 1), g = Gaussian(n, 2);
        LookaheadArgs args;
        args.momentum = OnDevice(m, shift);
        args.gradient = OnDevice(g, shift);
        args.update = OnDevice(std::vector<float>(n), shift);
        args.count = count;
        args.mu = 0.95f;
        args.clip = 0.25f;
        args.nesterov = nesterov;
        backend().Lookahead(stream(), args);
        Vector expected(n);
        for (size_t i = 0; i < n; ++i) {
          const double momentum = static_cast<double>(args.mu) * m[i] + 0.25 * g[i];
          expected[i] = nesterov ? 0.25 * g[i] + static_cast<double>(args.mu) * momentum : momentum;
        }
        EXPECT_LE(RelativeError(ToHost(args.update, n), expected), 2e-7) << count;
      }
    }
  }
}

TEST_F(StepKernelsTest, LookaheadLeavesTheNormsOfItsBlocks) {
  constexpr int64_t kOffsets[] = {0, 20004, 40009};  // the last is not aligned
  for (int64_t count : {1, 4097, 20001}) {
    for (bool nesterov : {false, true}) {
      for (size_t blocks : {2, 3}) {
        LookaheadArgs args;
        args.momentum = OnDevice(Gaussian(61000, 1));
        args.gradient = OnDevice(Gaussian(61000, 2));
        args.update = OnDevice(std::vector<float>(61000, 3.0f));
        args.offsets = absl::MakeConstSpan(kOffsets).first(blocks);
        args.count = count;
        args.mu = 0.95f;
        args.nesterov = nesterov;
        args.norms = OnDevice(std::vector<kernels::BlockNorm>(3));
        args.square_sums = OnDevice(std::vector<double>(3));
        backend().Lookahead(stream(), args);
        const std::vector<float> update = ToHost(args.update, 61000);
        for (size_t i = 0; i < blocks; ++i) {
          double squares = 0, largest = 0;
          for (int64_t k = kOffsets[i]; k < kOffsets[i] + count; ++k) {
            const double value = update[static_cast<size_t>(k)];
            squares += value * value;
            largest = std::max(largest, std::fabs(value));
          }
          const kernels::BlockNorm norm = ToHost(args.norms, blocks)[i];
          EXPECT_NEAR(norm.square_sum, squares, 1e-13 * squares) << count << ", block " << i;
          EXPECT_EQ(norm.largest, largest) << count << ", block " << i;
          EXPECT_EQ(ToHost(args.square_sums, blocks)[i], norm.square_sum);
        }
      }
    }
  }
}

TEST_F(StepKernelsTest, MuonCommitAgreesWithFloat64) {
  for (int64_t count : kCounts) {
    for (size_t shift : {0, 1}) {
      const auto n = static_cast<size_t>(count);
      const std::vector<float> m = Gaussian(n, 1), g = Gaussian(n, 2), w = Gaussian(n, 3),
                               o = Gaussian(n, 4);
      MuonCommitArgs args;
      args.momentum = OnDevice(m, shift);
      args.gradient = OnDevice(g, shift);
      args.weight = OnDevice(w, shift);
      args.orthogonal = OnDevice(o, shift);
      args.count = count;
      args.mu = 0.95f;
      args.clip = 0.5f;
      args.decay = 0.0625f;
      args.scale = 0.02f;
      backend().MuonCommit(stream(), args);
      Vector momentum(n), weight(n);
      for (size_t i = 0; i < n; ++i) {
        momentum[i] = static_cast<double>(args.mu) * m[i] + 0.5 * g[i];
        weight[i] = w[i] * (1 - 0.0625) - static_cast<double>(args.scale) * o[i];
      }
      EXPECT_LE(RelativeError(ToHost(args.momentum, n), momentum), 2e-7) << count;
      EXPECT_LE(RelativeError(ToHost(args.weight, n), weight), 2e-7) << count;
    }
  }
}

TEST_F(StepKernelsTest, MuonCommitPublishesTheWeightThatItWrote) {
  constexpr size_t kCount = 4099;
  for (Dtype dtype : kDtypes) {
    for (size_t shift : {0, 1}) {
      MuonCommitArgs args;
      args.momentum = OnDevice(Gaussian(kCount, 1), shift);
      args.gradient = OnDevice(Gaussian(kCount, 2), shift);
      args.weight = OnDevice(Gaussian(kCount, 3), shift);
      args.orthogonal = OnDevice(Gaussian(kCount, 4), shift);
      args.count = kCount;
      args.mu = 0.95f;
      args.scale = 0.02f;
      auto* published = static_cast<uint8_t*>(Bytes((kCount + shift) * ByteSize(dtype))) +
                        shift * ByteSize(dtype);
      args.published = published;
      args.published_dtype = dtype;
      backend().MuonCommit(stream(), args);
      EXPECT_EQ(ToHost(published, kCount * ByteSize(dtype)),
                Encode(ToHost(args.weight, kCount), dtype).bytes)
          << Name(dtype).data();
    }
  }
}

AdamwArgs DefaultAdamw() {
  AdamwArgs args;
  args.lr = 1e-3;
  args.beta1 = 0.9;
  args.beta2 = 0.999;
  args.eps = 1e-8;
  args.weight_decay = 0.01;
  return args;
}

TEST_F(StepKernelsTest, AdamwAgreesWithFloat64OverTwentySteps) {
  constexpr int64_t kCount = 4099;
  std::vector<float> w = Gaussian(kCount, 1);
  AdamwArgs args = DefaultAdamw();
  args.weight = OnDevice(w);
  args.exp_avg = OnDevice(std::vector<float>(kCount, 0.0f));
  args.exp_avg_sq = OnDevice(std::vector<float>(kCount, 0.0f));
  args.count = kCount;
  Vector weight = Widen(w), m(kCount, 0.0), v(kCount, 0.0);
  for (int step = 1; step <= 20; ++step) {
    const std::vector<float> g = Gaussian(kCount, 100 + static_cast<uint32_t>(step), 1e-3);
    args.gradient = OnDevice(g);
    args.step = step;
    backend().Adamw(stream(), args);
    const double c1 = 1 - std::pow(args.beta1, step);
    const double c2 = 1 - std::pow(args.beta2, step);
    for (size_t i = 0; i < weight.size(); ++i) {
      weight[i] *= 1 - args.lr * args.weight_decay;
      m[i] += (1 - args.beta1) * (g[i] - m[i]);
      v[i] = args.beta2 * v[i] + (1 - args.beta2) * g[i] * g[i];
      weight[i] -= args.lr / c1 * m[i] / (std::sqrt(v[i]) / std::sqrt(c2) + args.eps);
    }
  }
  EXPECT_LE(RelativeError(ToHost(args.exp_avg, kCount), m), 1e-6);
  EXPECT_LE(RelativeError(ToHost(args.exp_avg_sq, kCount), v), 1e-6);
  EXPECT_LE(RelativeError(ToHost(args.weight, kCount), weight), 1e-6);
}

TEST_F(StepKernelsTest, AdamwOfARangeHasTheBitsOfTheWhole) {
  constexpr int64_t kCount = 6007;
  const std::vector<float> w = Gaussian(kCount, 1), m = Gaussian(kCount, 2),
                           g = Gaussian(kCount, 4);
  std::vector<float> v = Gaussian(kCount, 3);
  for (float& value : v) value *= value;
  AdamwArgs whole = DefaultAdamw();
  whole.weight = OnDevice(w), whole.exp_avg = OnDevice(m), whole.exp_avg_sq = OnDevice(v),
  whole.gradient = OnDevice(g);
  whole.count = kCount;
  whole.step = 5;
  backend().Adamw(stream(), whole);
  AdamwArgs split = DefaultAdamw();
  split.weight = OnDevice(w), split.exp_avg = OnDevice(m), split.exp_avg_sq = OnDevice(v),
  split.gradient = OnDevice(g);
  split.step = 5;
  AdamwArgs part = split;
  for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 1001}, {1001, kCount}}) {
    part.weight = split.weight + begin, part.exp_avg = split.exp_avg + begin;
    part.exp_avg_sq = split.exp_avg_sq + begin, part.gradient = split.gradient + begin;
    part.count = end - begin;
    backend().Adamw(stream(), part);
  }
  EXPECT_EQ(ToHost(whole.weight, kCount), ToHost(split.weight, kCount));
  EXPECT_EQ(ToHost(whole.exp_avg_sq, kCount), ToHost(split.exp_avg_sq, kCount));
}

TEST_F(StepKernelsTest, PublishRoundsToNearestEven) {
  std::vector<float> values = Gaussian(5003, 1);
  // Halfway cases of both 16-bit types, the edges of fp16, and what must stay itself.
  for (float v : {1.00390625f, 1.01171875f, 1.00048828125f, 1.00146484375f, 65504.0f, 65519.0f,
                  65520.0f, 6e-8f, 2e-8f, -0.0f, std::numeric_limits<float>::infinity()}) {
    values.push_back(v);
  }
  for (Dtype dtype : kDtypes) {
    for (size_t shift : {0, 1}) {
      const float* from = OnDevice(values, shift);
      auto* to = static_cast<uint8_t*>(Bytes((values.size() + shift) * ByteSize(dtype))) +
                 shift * ByteSize(dtype);
      backend().Publish(stream(), from, dtype, to, static_cast<int64_t>(values.size()));
      EXPECT_EQ(ToHost(to, values.size() * ByteSize(dtype)), Encode(values, dtype).bytes)
          << Name(dtype).data();
    }
  }
}

TEST_F(StepKernelsTest, PublishKeepsNaN) {
  const float* from = OnDevice(std::vector<float>(8, std::numeric_limits<float>::quiet_NaN()));
  auto* to = static_cast<__half*>(Bytes(16));
  backend().Publish(stream(), from, Dtype::kF16, to, 8);
  for (__half h : ToHost(to, 8)) EXPECT_TRUE(std::isnan(__half2float(h)));
}

}  // namespace
}  // namespace dmuon::cuda
