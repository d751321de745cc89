// How Newton-Schulz behaves on every kernel that this processor runs, each forced in turn; newton_schulz_accuracy_test.cc
// has the tables of errors.
#include "kernels/newton_schulz/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/newton_schulz/coefficients.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/runner.h"
#include "tests/kernels/spectra.h"

namespace dmuon::kernels {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, EachKernel, ForcedKernels(), KernelOf);

TEST_P(EachKernel, EveryCoefficientSetGivesItsOwnPolynomial) {
  const Matrix<float> in = reference::Gaussian(129, 257, kSeed);
  for (absl::Span<const Coefficients> set : {PolarExpress(), You(), Jordan()}) {
    for (int steps : {1, 3, 5, 7}) {
      NewtonSchulzOptions options;
      options.coefficients.assign(set.begin(), set.end());
      options.steps = steps;
      options.deterministic = true;
      for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
        options.form = form;
        const Matrix<double> exact = reference::NewtonSchulz(in, Schedule(options));
        EXPECT_LE(reference::RelativeError(runner_.Run(options, in), exact), 2e-5)
            << steps << " steps, " << runner_.kernel();
      }
    }
  }
}

TEST_P(EachKernel, RestartsGiveTheSamePolynomial) {
  const Matrix<float> in = reference::Gaussian(70, 300, kSeed);
  const Matrix<double> exact = reference::NewtonSchulz(in, Schedule({}));
  for (const std::vector<int>& restarts : {std::vector<int>{}, {2}, {3}, {2, 4}, {1, 2, 3, 4}}) {
    NewtonSchulzOptions options;
    options.restarts = restarts;
    options.iteration_dtype = Dtype::kF32;
    EXPECT_LE(reference::RelativeError(runner_.Run(options, in), exact), 1e-5);
    if (restarts.size() < 2) continue;  // refused in bf16, where hard spectra explode
    options.iteration_dtype = Dtype::kBF16;
    EXPECT_LE(reference::RelativeError(runner_.Run(options, in), exact), 2e-2);
  }
}

TEST_P(EachKernel, ScaleOfTheInputDoesNotMatter) {
  const Matrix<float> in = reference::Gaussian(65, 130, kSeed);
  for (const Mode& mode : kModes) {
    const Matrix<float> expected = runner_.Run(OptionsFor(mode), in);
    for (int power :
         {-99, -40, -1, 1, 40, 90}) {  // 2^-99 = 1.6e-30, exact, so the bits must be the same
      Matrix<float> scaled = in;
      for (float& value : scaled.values) value = std::ldexp(value, power);
      EXPECT_EQ(runner_.Run(OptionsFor(mode), scaled).values, expected.values) << "2^" << power;
    }
  }
}

TEST_P(EachKernel, SubnormalEntriesAreNormalisedToo) {
  Matrix<float> in(40, 50);
  const Matrix<float> shape = reference::Gaussian(40, 50, kSeed);
  for (size_t i = 0; i < in.values.size(); ++i) in.values[i] = shape.values[i] * 1e-39f;
  const Matrix<double> exact = reference::NewtonSchulz(in, Schedule({}));
  EXPECT_LE(reference::RelativeError(runner_.Run(OptionsFor(kModes[0]), in), exact), 1e-5);
}

TEST_P(EachKernel, NonFiniteInputsGoThrough) {
  for (float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Matrix<float> in = reference::Gaussian(40, 90, kSeed);
    in(3, 5) = bad;
    for (const Mode& mode : kModes) {
      const Matrix<float> out = runner_.Run(OptionsFor(mode), in);
      EXPECT_TRUE(std::any_of(out.values.begin(), out.values.end(),
                              [](float x) { return !std::isfinite(x); }));
    }
  }
}

TEST_P(EachKernel, OutputMayBeTheInput) {
  const Matrix<float> in = reference::Gaussian(100, 300, kSeed);
  for (const Mode& mode : kModes) {
    const Matrix<float> expected = runner_.Run(OptionsFor(mode), in);
    auto plan = PlanNewtonSchulz(runner_.backend(), OptionsFor(mode), in.rows, in.cols);
    ASSERT_TRUE(plan.ok());
    void* workspace = *runner_.backend().Allocate((*plan)->workspace_bytes());
    Matrix<float> both = in;
    (*plan)->Run({}, both.values.data(), both.values.data(), workspace);
    runner_.backend().Free(workspace);
    EXPECT_EQ(both.values, expected.values);
  }
}

TEST_P(EachKernel, WorkspaceContentsDoNotMatter) {
  const Matrix<float> in = reference::Gaussian(45, 333, kSeed);
  for (const Mode& mode : kModes) {
    const Matrix<float> expected = runner_.Run(OptionsFor(mode), in);
    auto plan = PlanNewtonSchulz(runner_.backend(), OptionsFor(mode), in.rows, in.cols);
    ASSERT_TRUE(plan.ok());
    void* workspace = *runner_.backend().Allocate((*plan)->workspace_bytes());
    std::memset(workspace, 0xff, (*plan)->workspace_bytes());  // NaN in every dtype
    Matrix<float> out(in.rows, in.cols);
    (*plan)->Run({}, in.values.data(), out.values.data(), workspace);
    runner_.backend().Free(workspace);
    EXPECT_EQ(out.values, expected.values);
  }
}

TEST_P(EachKernel, BitsAreTheSameForAnyNumberOfThreads) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{300, 200}, {160, 700}, {33, 2000}}) {
    const Matrix<float> in = reference::Gaussian(rows, cols, kSeed);
    for (const Mode& mode : kModes) {
      Runner one(GetParam(), 1);
      const Matrix<float> expected = one.Run(OptionsFor(mode), in);
      for (int threads : {2, 3}) {
        Runner several(GetParam(), threads);
        EXPECT_EQ(several.Run(OptionsFor(mode), in).values, expected.values)
            << threads << " threads, " << several.kernel();
      }
    }
  }
}

TEST_P(EachKernel, TwoHundredRepeatsGiveTheSameBits) {
  Runner runner(GetParam(), 3);
  const Matrix<float> in = reference::Gaussian(96, 224, kSeed);
  for (const Mode& mode : kModes) {
    const Matrix<float> expected = runner.Run(OptionsFor(mode), in);
    for (int repeat = 0; repeat < 200; ++repeat) {
      ASSERT_EQ(runner.Run(OptionsFor(mode), in).values, expected.values)
          << "repeat " << repeat << runner.kernel();
    }
  }
}

TEST_P(EachKernel, WorkersAtOnceGetTheBitsOfOneAlone) {
  constexpr int kWorkers = 3;
  std::vector<Matrix<float>> inputs, expected;
  for (int w = 0; w < kWorkers; ++w) {
    inputs.push_back(reference::Gaussian(64 + 32 * w, 200, kSeed + w));
    expected.push_back(runner_.Run({}, inputs.back()));
  }
  std::vector<std::thread> workers;
  for (int w = 0; w < kWorkers; ++w) {
    workers.emplace_back([&, w] {
      auto plan = PlanNewtonSchulz(runner_.backend(), {}, inputs[w].rows, inputs[w].cols);
      ASSERT_TRUE(plan.ok());
      void* workspace = *runner_.backend().Allocate((*plan)->workspace_bytes());
      Matrix<float> out(inputs[w].rows, inputs[w].cols);
      for (int repeat = 0; repeat < 20; ++repeat) {
        (*plan)->Run({}, inputs[w].values.data(), out.values.data(), workspace);
        EXPECT_EQ(out.values, expected[w].values) << "worker " << w;
      }
      runner_.backend().Free(workspace);
    });
  }
  for (std::thread& worker : workers) worker.join();
}

TEST(Plan, DeterministicMeansFp32) {
  Runner runner("");
  NewtonSchulzOptions options;
  options.deterministic = true;
  for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
    options.form = form;
    auto plan = PlanNewtonSchulz(runner.backend(), options, 128, 512);
    ASSERT_TRUE(plan.ok());
    EXPECT_THAT((*plan)->kernel(), testing::HasSubstr("fp32"));
  }
}

TEST(Plan, GramRunsTheDirectFormOnSquares) {
  Runner runner("");
  const auto form_of = [&](int64_t rows, int64_t cols) {
    return (*PlanNewtonSchulz(runner.backend(), {}, rows, cols))->form();
  };
  EXPECT_EQ(form_of(128, 128), NsForm::kDirect);
  EXPECT_EQ(form_of(128, 192), NsForm::kDirect);
  EXPECT_EQ(form_of(128, 193), NsForm::kGram);
  EXPECT_EQ(form_of(512, 128), NsForm::kGram);
}

TEST(Plan, Tf32GoesWithFp32Alone) {
  NewtonSchulzOptions options;
  options.tf32 = true;
  const auto refused = [&](const char* given) {
    const absl::Status status = Validate(options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << given;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(given));
  };
  refused("given none");
  options.iteration_dtype = Dtype::kBF16;
  refused("given bf16");
  options.iteration_dtype = Dtype::kF32;
  EXPECT_TRUE(Validate(options).ok());
  options.deterministic = true;
  refused("given deterministic");
}

TEST(Plan, RefusesWhatItCannotRun) {
  Runner runner("");
  EXPECT_EQ(PlanNewtonSchulz(runner.backend(), {}, 0, 5).status().code(),
            absl::StatusCode::kInvalidArgument);
  NewtonSchulzOptions options;
  options.iteration_dtype = Dtype::kF16;
  const absl::Status fp16 = PlanNewtonSchulz(runner.backend(), options, 64, 64).status();
  EXPECT_EQ(fp16.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(fp16.message()), testing::HasSubstr("fp16 is not built on the cpu"));
  EXPECT_THAT(std::string(fp16.message()), testing::HasSubstr("bf16 or fp32"));
  options.iteration_dtype = Dtype::kF32;
  options.tf32 = true;
  const absl::Status tf32 = PlanNewtonSchulz(runner.backend(), options, 64, 64).status();
  EXPECT_EQ(tf32.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(tf32.message()), testing::HasSubstr("tf32 is not built on the cpu"));
}

}  // namespace
}  // namespace dmuon::kernels
