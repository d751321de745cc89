#include "kernels/newton_schulz/newton_schulz.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/stream.h"
#include "kernels/newton_schulz/coefficients.h"
#include "tests/cuda/device.h"
#include "tests/cuda/reference.h"

namespace dmuon::cuda {
namespace {

using kernels::NewtonSchulzOptions;
using kernels::NsForm;
using reference::Gaussian;
using reference::RelativeError;
using reference::Vector;

const auto* const g_coverage = testing::AddGlobalTestEnvironment(
    new KernelCoverage({"NormsKernel", "NormalizeKernel", "MirrorKernel", "UnpadKernel",
                        "FillKernel", "DistanceKernel"}));

struct Bound {
  double gaussian, top;
};

// docs/numerics.md, "Accuracy to hold".
Bound BoundOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return {1e-5, 0.005};
    case Dtype::kF16: return {2e-3, 0.05};
    case Dtype::kBF16: return {2e-2, 0.2};
  }
  return {};
}

NewtonSchulzOptions Options(Dtype dtype, NsForm form = NsForm::kGram) {
  NewtonSchulzOptions options;
  options.iteration_dtype = dtype;
  options.form = form;
  return options;
}

class NewtonSchulzTest : public DeviceTest {
 protected:
  std::unique_ptr<kernels::NewtonSchulz> Plan(const NewtonSchulzOptions& options, int64_t rows,
                                              int64_t cols) {
    auto plan = kernels::PlanNewtonSchulz(backend(), options, rows, cols);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }
  std::vector<float> Run(const NewtonSchulzOptions& options, const std::vector<float>& in,
                         int64_t rows, int64_t cols, size_t shift = 0) {
    const auto plan = Plan(options, rows, cols);
    float* device = OnDevice(in, shift);
    float* out =
        OnDevice(std::vector<float>(in.size(), std::numeric_limits<float>::quiet_NaN()), shift);
    plan->Run(stream(), device, out, Bytes(plan->workspace_bytes()));
    const std::vector<float> after = ToHost(device, in.size());
    EXPECT_EQ(std::memcmp(after.data(), in.data(), in.size() * sizeof(float)), 0)
        << "the input lost its bytes";
    return ToHost(out, in.size());
  }
};

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1},   {1, 7},     {7, 1},    {8, 9},    {9, 8},
                             {64, 64}, {127, 129}, {70, 200}, {200, 70}, {256, 520}};

TEST_F(NewtonSchulzTest, AgreesWithFloat64OnGaussianMatricesOfEveryShape) {
  for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
      for (const auto [rows, cols] : kShapes) {
        const NewtonSchulzOptions options = Options(dtype, form);
        const std::vector<float> in = Gaussian(static_cast<size_t>(rows * cols), 3);
        const Vector expected = reference::NewtonSchulz(in, rows, cols, kernels::Schedule(options));
        // A square Gaussian matrix has small singular values, and a matrix of a few rows large ones: there the polynomial is
        // steep, and the rounding of the input alone is amplified.
        const double allowance = rows == cols || std::min(rows, cols) < 16 ? 4 : 1;
        EXPECT_LE(RelativeError(Run(options, in, rows, cols), expected),
                  allowance * BoundOf(dtype).gaussian)
            << Name(dtype).data() << (form == NsForm::kGram ? " gram " : " direct ") << rows
            << " x " << cols;
      }
    }
  }
}

TEST_F(NewtonSchulzTest, HoldsTheTopSingularValueOnHardSpectra) {
  constexpr int64_t kRows = 96, kCols = 208;
  const auto spectrum = [](auto f) {
    Vector sigma(kRows);
    for (int64_t i = 0; i < kRows; ++i) sigma[static_cast<size_t>(i)] = f(static_cast<double>(i));
    return sigma;
  };
  const Vector spectra[] = {
      spectrum([](double i) { return std::pow(10, -10 * i / (kRows - 1)); }),
      spectrum([](double i) { return 1 / (i + 1); }),
      spectrum([](double i) { return 1 / (i + 1) / (i + 1); }),
      spectrum([](double i) { return i == 0 ? 1.0 : 1e-3; }),
      spectrum([](double i) { return i < 10 ? 1.0 : 0.0; }),
  };
  for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
      for (const Vector& sigma : spectra) {
        const NewtonSchulzOptions options = Options(dtype, form);
        const std::vector<float> in = reference::WithSpectrum(kRows, kCols, sigma, 5);
        const std::vector<float> out = Run(options, in, kRows, kCols);
        EXPECT_LE(reference::TopSingularValue(out, kRows, kCols),
                  kernels::Maximum(kernels::Schedule(options)) + BoundOf(dtype).top)
            << Name(dtype).data() << (form == NsForm::kGram ? " gram, " : " direct, ") << sigma[1]
            << ", " << sigma[2];
      }
    }
  }
}

// What TF32 does to factors of fp32 is what fp16 does, without its range: no better than 1e-4, no worse than twice fp16's bound.
TEST_F(NewtonSchulzTest, Tf32RoundsTheFactorsOfFp32Products) {
  for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
    NewtonSchulzOptions options = Options(Dtype::kF32, form);
    options.tf32 = true;
    EXPECT_THAT(Plan(options, 96, 208)->kernel(), testing::HasSubstr(" tf32 "));
    const std::vector<float> in = Gaussian(96 * 208, 3);
    const Vector expected = reference::NewtonSchulz(in, 96, 208, kernels::Schedule(options));
    const double error = RelativeError(Run(options, in, 96, 208), expected);
    EXPECT_GT(error, 1e-4);
    EXPECT_LE(error, 2 * BoundOf(Dtype::kF16).gaussian);
    const Vector sigma = [] {
      Vector values(96);
      for (size_t i = 0; i < values.size(); ++i) values[i] = 1 / static_cast<double>(i + 1);
      return values;
    }();
    const std::vector<float> out =
        Run(options, reference::WithSpectrum(96, 208, sigma, 5), 96, 208);
    EXPECT_LE(reference::TopSingularValue(out, 96, 208),
              kernels::Maximum(kernels::Schedule(options)) + BoundOf(Dtype::kF16).top);
  }
}

TEST_F(NewtonSchulzTest, DoesNotDependOnTheScaleOfItsInput) {
  const std::vector<float> in = Gaussian(96 * 200, 3);
  const std::vector<float> once = Run(Options(Dtype::kF16), in, 96, 200);
  for (double scale : {1e-30, 1e-10, 1e10, 1e30}) {
    std::vector<float> scaled = in;
    for (float& value : scaled) value = static_cast<float>(value * scale);
    const std::vector<float> out = Run(Options(Dtype::kF16), scaled, 96, 200);
    EXPECT_LE(RelativeError(out, reference::Widen(once)), 2e-3) << scale;
  }
}

TEST_F(NewtonSchulzTest, OfZerosIsZerosAndOfNaNIsNaN) {
  for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
    std::vector<float> in(96 * 200, 0.0f);
    EXPECT_THAT(Run(Options(Dtype::kF16, form), in, 96, 200), testing::Each(0.0f));
    in[777] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(Run(Options(Dtype::kF16, form), in, 96, 200)[777]));
  }
}

TEST_F(NewtonSchulzTest, WritesAnOutputThatIsNotAlignedAndOneThatIsTheInput) {
  const std::vector<float> in = Gaussian(70 * 203, 3);
  const std::vector<float> aligned = Run(Options(Dtype::kF16), in, 70, 203);
  EXPECT_EQ(Run(Options(Dtype::kF16), in, 70, 203, 1), aligned);
  const auto plan = Plan(Options(Dtype::kF16), 70, 203);
  float* device = OnDevice(in);
  plan->Run(stream(), device, device, Bytes(plan->workspace_bytes()));
  EXPECT_EQ(ToHost(device, in.size()), aligned);
}

TEST_F(NewtonSchulzTest, HasTheSameBitsPreparedOrNotAndEveryTime) {
  for (const auto [rows, cols] : {Shape{320, 768}, Shape{768, 320}, Shape{320, 320}}) {
    const std::vector<float> in = Gaussian(static_cast<size_t>(rows * cols), 3);
    const auto plan = Plan(Options(Dtype::kF16), rows, cols);
    void* workspace = Bytes(plan->workspace_bytes());
    float* device = OnDevice(in);
    float* out = OnDevice(in);
    plan->Run(stream(), device, out, workspace);
    const std::vector<float> first = ToHost(out, in.size());
    ASSERT_TRUE(
        plan->Prepare(
                {.in = device, .out = out, .offsets = kernels::kOneBlock, .workspace = workspace})
            .ok());
    const int repeats = Fake<void()>("fake_cuda_counters") != nullptr ? 3 : 200;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      backend().CopyFromHost(stream(), out, in.data(), in.size() * sizeof(float));
      plan->Run(stream(), device, out, workspace);
      ASSERT_EQ(ToHost(out, in.size()), first) << plan->kernel() << ", repeat " << repeat;
    }
  }
}

// Blocks of one shape with gaps between them; in the last case more than run at once.
TEST_F(NewtonSchulzTest, BlocksOfABatchHaveTheBitsOfEachAloneAndAgreeWithFloat64) {
  struct Case {
    Shape shape;
    size_t count;
    NsForm form;
    int64_t gap;
  };
  constexpr Case kCases[] = {{{64, 96}, 5, NsForm::kGram, 8},
                             {{200, 70}, 3, NsForm::kGram, 5},
                             {{64, 64}, 3, NsForm::kDirect, 4},
                             {{520, 600}, 2, NsForm::kGram, 0},
                             {{16, 40}, 131, NsForm::kGram, 1}};
  for (const auto& [shape, count, form, gap] : kCases) {
    const auto [rows, cols] = shape;
    const NewtonSchulzOptions options = Options(Dtype::kF16, form);
    auto plan =
        kernels::PlanNewtonSchulz(backend(), options, rows, cols, static_cast<int64_t>(count));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_THAT((*plan)->kernel(), testing::HasSubstr(" at once")) << rows << " x " << cols;
    const auto numel = static_cast<size_t>(rows * cols), pitch = numel + static_cast<size_t>(gap);
    const std::vector<float> in = Gaussian(count * pitch, 3);
    std::vector<int64_t> offsets;
    for (size_t i = 0; i < count; ++i) offsets.push_back(static_cast<int64_t>(i * pitch));
    void* workspace = Bytes((*plan)->batch_workspace_bytes(static_cast<int64_t>(count)));
    float* both = OnDevice(in);
    const kernels::NewtonSchulzBatch batch = {
        .in = both, .out = both, .offsets = offsets, .workspace = workspace};
    ASSERT_TRUE((*plan)->Prepare(batch).ok());
    backend().CopyFromHost(stream(), both, in.data(), in.size() * sizeof(float));
    (*plan)->RunBatch(stream(), batch);
    const std::vector<float> out = ToHost(both, in.size());
    float* alone = OnDevice(std::vector<float>(numel));
    for (size_t i = 0; i<count; i += count> 10 ? count - 1 : 1) {
      const std::vector<float> block(in.begin() + offsets[i], in.begin() + offsets[i] + numel),
          got(out.begin() + offsets[i], out.begin() + offsets[i] + numel);
      (*plan)->Run(stream(), OnDevice(block), alone, workspace);
      EXPECT_EQ(got, ToHost(alone, numel)) << "block " << i << " of " << rows << " x " << cols;
      const Vector expected =
          reference::NewtonSchulz(block, rows, cols, kernels::Schedule(options));
      const double allowance = rows == cols || std::min(rows, cols) < 32 ? 4 : 1;
      EXPECT_LE(RelativeError(got, expected), allowance * BoundOf(Dtype::kF16).gaussian)
          << "block " << i << " of " << rows << " x " << cols;
      for (size_t k = numel; k < pitch; ++k)
        EXPECT_EQ(out[i * pitch + k], in[i * pitch + k]) << "between the blocks";
    }
  }
}

TEST_F(NewtonSchulzTest, APlanTakesWhatWasSaidBefore) {
  auto* const bytes = Fake<FakeCudaBytes(int)>("fake_cuda_bytes");
  auto* const forget_most = Fake<void()>("fake_cuda_forget_most");
  struct Case {
    Shape shape;
    int64_t blocks;
    NewtonSchulzOptions options;
  };
  NewtonSchulzOptions deterministic;
  deterministic.deterministic = true;
  const Case cases[] = {
      {{70, 203}, 1, Options(Dtype::kF16)},   {{203, 70}, 1, Options(Dtype::kF32)},
      {{16, 40}, 131, Options(Dtype::kBF16)}, {{64, 64}, 3, Options(Dtype::kF16, NsForm::kDirect)},
      {{520, 1100}, 1, Options(Dtype::kF16)}, {{520, 1100}, 1, deterministic}};
  for (const auto& [shape, blocks, options] : cases) {
    const auto [rows, cols] = shape;
    const auto said = kernels::PlanMemory(backend(), options, rows, cols, blocks);
    ASSERT_TRUE(said.ok()) << said.status();
    EXPECT_EQ(said->planning_bytes > 0, !options.deterministic);
    if (forget_most != nullptr) forget_most();
    const auto plan = kernels::PlanNewtonSchulz(backend(), options, rows, cols, blocks);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ((*plan)->batch_workspace_bytes(blocks), said->workspace_bytes) << (*plan)->kernel();
    if (bytes == nullptr) continue;
    EXPECT_EQ(bytes(0).most - bytes(0).live, said->planning_bytes) << (*plan)->kernel();
  }
}

// Of the CUDA module's own kind, whose choices can be forced.
CudaBackend& Cuda(kernels::Backend& backend) { return static_cast<CudaBackend&>(backend); }

struct CutCase {
  CutChoice cut;
  int64_t rows, cols, blocks;
};
constexpr CutCase kCutCases[] = {{{Cut::kMirror, 0}, 192, 320, 1}, {{Cut::kPanels, 2}, 192, 320, 1},
                                 {{Cut::kPanels, 3}, 200, 320, 1}, {{Cut::kPanels, 3}, 320, 200, 1},
                                 {{Cut::kPanels, 2}, 130, 140, 3}, {{Cut::kLevels, 1}, 256, 320, 1},
                                 {{Cut::kLevels, 2}, 256, 320, 1}, {{Cut::kLevels, 2}, 320, 250, 1},
                                 {{Cut::kLevels, 3}, 512, 512, 1}};

TEST_F(NewtonSchulzTest, EveryWayOfCuttingATriangleGivesTheWholeProduct) {
  for (const auto& [cut, rows, cols, blocks] : kCutCases) {
    for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
      const NewtonSchulzOptions options = Options(Dtype::kF32, form);
      const NewtonSchulzTuning tuning = {.measure = false, .gram_cut = cut, .square_cut = cut};
      auto plan = Cuda(backend()).MakeTuned(options, tuning, rows, cols, blocks);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_THAT((*plan)->kernel(), testing::HasSubstr(cut.name() + "/" + cut.name()));
      const auto numel = static_cast<size_t>(rows * cols);
      std::vector<int64_t> offsets;
      for (int64_t i = 0; i < blocks; ++i) offsets.push_back(i * rows * cols);
      const std::vector<float> in = Gaussian(static_cast<size_t>(blocks) * numel, 3);
      const kernels::NewtonSchulzBatch batch = {
          .in = OnDevice(in),
          .out = OnDevice(std::vector<float>(in.size())),
          .offsets = offsets,
          .workspace = Bytes((*plan)->batch_workspace_bytes(blocks))};
      ASSERT_TRUE((*plan)->Prepare(batch).ok());
      (*plan)->RunBatch(stream(), batch);
      const std::vector<float> out = ToHost(batch.out, in.size());
      const std::vector<float> last(out.end() - static_cast<int64_t>(numel), out.end()),
          last_in(in.end() - static_cast<int64_t>(numel), in.end());
      const double allowance = rows == cols ? 4 : 1;
      EXPECT_LE(RelativeError(
                    last, reference::NewtonSchulz(last_in, rows, cols, kernels::Schedule(options))),
                allowance * BoundOf(Dtype::kF32).gaussian)
          << cut.name() << ", " << rows << " x " << cols;
    }
  }
}

// The stand-in gets products of this shape wrong; a part of two panels of an order of 512 has it, and a whole product has not.
TEST_F(NewtonSchulzTest, AWayOfCuttingThatDoesNotAgreeIsNotTaken) {
  if (Fake<void()>("fake_cuda_counters") == nullptr) GTEST_SKIP() << "on the stand-ins alone";
  setenv("DMUON_FAKE_CUBLASLT_WRONG", "512x256", 1);
  auto plan = Cuda(backend()).MakeTuned(Options(Dtype::kF16), {}, 512, 1030, 1);
  unsetenv("DMUON_FAKE_CUBLASLT_WRONG");
  ASSERT_TRUE(plan.ok()) << plan.status();
  bool seen = false;
  for (const auto* measured : {&(*plan)->measurements().gram, &(*plan)->measurements().square}) {
    EXPECT_FALSE(measured->empty());
    for (const CutMeasurement& m : *measured) {
      const bool wrong = m.choice.cut == Cut::kPanels && m.choice.parts == 2;
      EXPECT_EQ(m.agrees, !wrong) << m.choice.name() << ": " << m.difference;
      seen = seen || wrong;
    }
  }
  EXPECT_TRUE(seen);
  EXPECT_THAT((*plan)->kernel(), testing::Not(testing::HasSubstr("panels2")));
}

TEST_F(NewtonSchulzTest, WhereNothingCanBeRecordedItRunsAsItIsEnqueued) {
  auto* const script = Fake<void(const char*)>("fake_cuda_script");
  if (script == nullptr) GTEST_SKIP() << "on the stand-ins alone";
  const std::vector<float> in = Gaussian(200 * 333, 3);
  const std::vector<float> recorded = Run({.deterministic = true}, in, 200, 333);
  script("cudaStreamBeginCapture:1+=fail(801)");
  auto plan = kernels::PlanNewtonSchulz(backend(), Options(Dtype::kF16), 200, 331);  // measures
  EXPECT_TRUE(plan.ok()) << plan.status();
  const auto same = Plan({.deterministic = true}, 200, 333);
  auto* const counters = Fake<FakeCudaCounters()>("fake_cuda_counters");
  const uint64_t graphs = counters().graphs;
  float* device = OnDevice(in);
  float* out = OnDevice(in);
  void* workspace = Bytes(same->workspace_bytes());
  const absl::Status prepared = same->Prepare(
      {.in = device, .out = out, .offsets = kernels::kOneBlock, .workspace = workspace});
  Fake<void(const char*, int, cudaError_t)>("fake_cuda_fail")("", 0, cudaSuccess);
  EXPECT_TRUE(prepared.ok()) << prepared;
  EXPECT_EQ(counters().graphs, graphs) << "something was recorded";
  same->Run(stream(), device, out, workspace);
  EXPECT_EQ(ToHost(out, in.size()), recorded);
}

TEST_F(NewtonSchulzTest, AStreamHasTheHighestPriority) {
  int least = 0, greatest = 0, priority = 1000;
  const auto range =
      Fake<decltype(cudaDeviceGetStreamPriorityRange)>("cudaDeviceGetStreamPriorityRange");
  const auto of = Fake<decltype(cudaStreamGetPriority)>("cudaStreamGetPriority");
  ASSERT_TRUE(range != nullptr && of != nullptr);
  ASSERT_EQ(range(&least, &greatest), cudaSuccess);
  const cudaStream_t own = static_cast<StreamState*>(stream().handle)->get();
  ASSERT_EQ(of(own, &priority), cudaSuccess);
  EXPECT_NE(least, greatest);
  EXPECT_EQ(priority, greatest);
}

TEST_F(NewtonSchulzTest, LargeBlocksRunOneAfterTheOther) {
  auto plan = kernels::PlanNewtonSchulz(backend(), {.deterministic = true}, 3000, 3000, 8);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT((*plan)->kernel(), testing::Not(testing::HasSubstr("at once")));
}

TEST_F(NewtonSchulzTest, SquareBlocksRunTheDirectFormAndSayWhatRuns) {
  EXPECT_EQ(Plan(Options(Dtype::kF16), 128, 128)->form(), NsForm::kDirect);
  EXPECT_EQ(Plan(Options(Dtype::kF16), 128, 512)->form(), NsForm::kGram);
  EXPECT_THAT(Plan(Options(Dtype::kBF16), 512, 128)->kernel(), testing::HasSubstr("gram bf16"));
  NewtonSchulzOptions deterministic;
  deterministic.deterministic = true;
  EXPECT_THAT(Plan(deterministic, 128, 512)->kernel(), testing::HasSubstr("gram fp32"));
  EXPECT_THAT(Plan({}, 128, 512)->kernel(), testing::HasSubstr("gram fp16"));
}

// The bounds of docs/numerics.md are for the default set. Sets that end steeper amplify the rounding of the input more: the
// direct form in fp16 has 2.4e-3 after the first three steps of the default.
constexpr double kSteeperSets = 2;

TEST_F(NewtonSchulzTest, TakesOtherStepsAndSets) {
  for (int steps : {1, 2, 3, 8}) {
    NewtonSchulzOptions options = Options(Dtype::kF16);
    options.steps = steps;
    const std::vector<float> in = Gaussian(96 * 200, 3);
    const Vector expected = reference::NewtonSchulz(in, 96, 200, kernels::Schedule(options));
    EXPECT_LE(RelativeError(Run(options, in, 96, 200), expected), kSteeperSets * 2e-3)
        << steps << " steps";
  }
  NewtonSchulzOptions jordan = Options(Dtype::kF16);
  jordan.coefficients.assign(kernels::Jordan().begin(), kernels::Jordan().end());
  const std::vector<float> in = Gaussian(96 * 200, 3);
  const Vector expected = reference::NewtonSchulz(in, 96, 200, kernels::Schedule(jordan));
  EXPECT_LE(RelativeError(Run(jordan, in, 96, 200), expected), kSteeperSets * 2e-3);
}

}  // namespace
}  // namespace dmuon::cuda
