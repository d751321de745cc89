// docs/numerics.md, held by every kernel that this processor runs, each forced in turn. Errors are printed beside their
// bounds.
#include "kernels/newton_schulz/newton_schulz.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/newton_schulz/coefficients.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/spectra.h"

namespace dmuon::kernels {
namespace {

using reference::Matrix;

constexpr uint64_t kSeed = 20240607;

// A backend forced to one kernel, and its runs.
class Runner {
 public:
  explicit Runner(absl::string_view kernel, int threads = 2) {
    auto backend = CreateCpuBackend({.threads = threads, .kernel = std::string(kernel)});
    if (backend.ok()) backend_ = *std::move(backend);
    EXPECT_TRUE(backend.ok() || backend.status().code() == absl::StatusCode::kFailedPrecondition)
        << backend.status();
  }

  bool runs_here() const { return backend_ != nullptr; }
  Backend& backend() { return *backend_; }

  Matrix<float> Run(const NewtonSchulzOptions& options, const Matrix<float>& in) {
    auto plan = PlanNewtonSchulz(*backend_, options, in.rows, in.cols);
    EXPECT_TRUE(plan.ok()) << plan.status();
    void* workspace = *backend_->Allocate((*plan)->workspace_bytes());
    Matrix<float> out(in.rows, in.cols);
    const std::vector<float> before = in.values;
    (*plan)->Run({}, in.values.data(), out.values.data(), workspace);
    EXPECT_EQ(std::memcmp(before.data(), in.values.data(), before.size() * sizeof(float)), 0)
        << "the input changed";
    kernel_ = (*plan)->kernel();
    backend_->Free(workspace);
    return out;
  }

  const std::string& kernel() const { return kernel_; }  // of the last run

 private:
  std::unique_ptr<Backend> backend_;
  std::string kernel_;
};

struct Mode {
  NsForm form;
  Dtype dtype;
  double error_bound;      // Gaussian, relative Frobenius
  double overshoot_bound;  // top singular value over the polynomial's maximum
};

constexpr Mode kModes[] = {
    {NsForm::kDirect, Dtype::kF32, 1e-5, 0.005},
    {NsForm::kGram, Dtype::kF32, 1e-5, 0.005},
    {NsForm::kDirect, Dtype::kBF16, 2e-2, 0.2},
    {NsForm::kGram, Dtype::kBF16, 2e-2, 0.2},
};

NewtonSchulzOptions OptionsFor(const Mode& mode) {
  NewtonSchulzOptions options;
  options.form = mode.form;
  options.iteration_dtype = mode.dtype;
  return options;
}

// The worst error of a group of runs, printed when the group is done.
class Worst {
 public:
  void Note(double error, const std::string& where) {
    if (error >= error_) error_ = error, where_ = where;
  }
  void Print(const std::string& what, double bound) const {
    if (!where_.empty())
      std::printf("  %-44s worst %.2e  bound %.0e  at %s\n", what.c_str(), error_, bound,
                  where_.c_str());
  }

 private:
  double error_ = 0;
  std::string where_;
};

std::string Shape(const Matrix<float>& x) { return absl::StrCat(x.rows, " x ", x.cols); }

class EachKernel : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!runner_.runs_here()) GTEST_SKIP() << "this processor cannot run " << GetParam();
  }
  Runner runner_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Cpu, EachKernel,
                         testing::ValuesIn(std::vector<std::string>(CpuKernelNames().begin(),
                                                                    CpuKernelNames().end())),
                         [](const auto& info) { return info.param; });

TEST_P(EachKernel, GaussianErrorStaysWithinItsBoundOnEveryShape) {
  constexpr int64_t kSides[] = {1, 2, 7, 8, 9, 64, 127, 129, 2048};
  const std::vector<Coefficients> schedule = Schedule({});
  Worst worst[std::size(kModes)];
  for (int64_t rows : kSides) {
    for (int64_t cols : kSides) {
      if (rows == 2048 && cols == 2048) continue;  // LargeShapes
      const Matrix<float> in = reference::Gaussian(rows, cols, kSeed + rows * 10000 + cols);
      const Matrix<double> exact = reference::NewtonSchulz(in, schedule);
      for (size_t i = 0; i < std::size(kModes); ++i) {
        const double error =
            reference::RelativeError(runner_.Run(OptionsFor(kModes[i]), in), exact);
        worst[i].Note(error, absl::StrCat(Shape(in), ", ", runner_.kernel()));
        EXPECT_LE(error, kModes[i].error_bound) << Shape(in) << " " << runner_.kernel();
      }
    }
  }
  for (size_t i = 0; i < std::size(kModes); ++i) {
    worst[i].Print(absl::StrCat("gaussian, ", kModes[i].form == NsForm::kGram ? "gram " : "direct ",
                                Name(kModes[i].dtype)),
                   kModes[i].error_bound);
  }
}

TEST_P(EachKernel, NoSpectrumLiftsTheTopSingularValueAboveItsBound) {
  const std::vector<Coefficients> schedule = Schedule({});
  const double maximum = Maximum(schedule);
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{96, 96}, {64, 512}, {2048, 32}, {129, 256}};
  for (const auto& [rows, cols] : kShapes) {
    for (const auto& [name, in] : reference::AllSpectra(rows, cols, kSeed)) {
      const Matrix<double> exact = reference::NewtonSchulz(in, schedule);
      for (const Mode& mode : kModes) {
        const Matrix<float> out = runner_.Run(OptionsFor(mode), in);
        const double top = reference::TopSingularValue(out);
        const double bound = maximum + mode.overshoot_bound;
        EXPECT_LE(top, bound) << name << " " << Shape(in) << " " << runner_.kernel();
        if (name == "zero") {
          EXPECT_EQ(top, 0) << runner_.kernel();
          continue;
        }
        if (rows == 64) {
          std::printf("  %-22s %-12s %-30s top %.4f  bound %.4f  error %.1e\n", name.c_str(),
                      Shape(in).c_str(), runner_.kernel().c_str(), top, bound,
                      reference::RelativeError(out, exact));
        }
      }
    }
  }
}

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

// The best kernel of this machine on the large sides; the others run the same code on the small ones above.
TEST(LargeShapes, GaussianAndPowerLawErrorsStayWithinTheirBounds) {
  Runner runner("");
  const std::vector<Coefficients> schedule = Schedule({});
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{512, 512}, {512, 2048}, {2048, 512}, {64, 4096}}) {
    const Matrix<float> in = reference::Gaussian(rows, cols, kSeed);
    const Matrix<double> exact = reference::NewtonSchulz(in, schedule);
    for (const Mode& mode : kModes) {
      const double error = reference::RelativeError(runner.Run(OptionsFor(mode), in), exact);
      EXPECT_LE(error, mode.error_bound) << Shape(in) << " " << runner.kernel();
      std::printf("  gaussian %-12s %-32s error %.2e  bound %.0e\n", Shape(in).c_str(),
                  runner.kernel().c_str(), error, mode.error_bound);
    }
  }
}

// Too large for the float64 reference in a test's time: judged by the fp32 direct form, which was judged above.
TEST(LargeShapes, AtTwoThousandAllFormsAgree) {
  Runner runner("");
  const Matrix<float> in = reference::Gaussian(2048, 2048, kSeed);
  const Matrix<float> direct = runner.Run(OptionsFor(kModes[0]), in);
  Matrix<double> expected(in.rows, in.cols);
  std::copy(direct.values.begin(), direct.values.end(), expected.values.begin());
  const double error = reference::RelativeError(runner.Run(OptionsFor(kModes[2]), in), expected);
  EXPECT_LE(error, kModes[2].error_bound);
  std::printf("  gaussian %-12s %-32s error %.2e  bound %.0e\n", Shape(in).c_str(),
              runner.kernel().c_str(), error, kModes[2].error_bound);
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

TEST(Plan, RefusesWhatItCannotRun) {
  Runner runner("");
  EXPECT_EQ(PlanNewtonSchulz(runner.backend(), {}, 0, 5).status().code(),
            absl::StatusCode::kInvalidArgument);
  NewtonSchulzOptions options;
  options.iteration_dtype = Dtype::kF16;
  EXPECT_EQ(PlanNewtonSchulz(runner.backend(), options, 64, 64).status().code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace dmuon::kernels
