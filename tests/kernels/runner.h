// What the tests of Newton-Schulz on the CPU share: backends forced to one kernel, the modes with the bounds of
// docs/numerics.md, and the worst of many runs.
#ifndef DMUON_TESTS_KERNELS_RUNNER_H_
#define DMUON_TESTS_KERNELS_RUNNER_H_

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "tests/kernels/reference.h"

namespace dmuon::kernels {

using reference::Matrix;

inline constexpr uint64_t kSeed = 20240607;

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

inline constexpr Mode kModes[] = {
    {NsForm::kDirect, Dtype::kF32, 1e-5, 0.005},
    {NsForm::kGram, Dtype::kF32, 1e-5, 0.005},
    {NsForm::kDirect, Dtype::kBF16, 2e-2, 0.2},
    {NsForm::kGram, Dtype::kBF16, 2e-2, 0.2},
};

inline NewtonSchulzOptions OptionsFor(const Mode& mode) {
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
      std::printf("  %-44s worst %.4g  bound %.4g  at %s\n", what.c_str(), error_, bound,
                  where_.c_str());
  }

 private:
  double error_ = 0;
  std::string where_;
};

inline std::string Shape(const Matrix<float>& x) { return absl::StrCat(x.rows, " x ", x.cols); }

// A test of every kernel that this processor runs, each forced in turn. Instantiate it with ForcedKernels().
class EachKernel : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!runner_.runs_here()) GTEST_SKIP() << "this processor cannot run " << GetParam();
  }
  Runner runner_{GetParam()};
};

inline auto ForcedKernels() {
  return testing::ValuesIn(
      std::vector<std::string>(CpuKernelNames().begin(), CpuKernelNames().end()));
}
inline std::string KernelOf(const testing::TestParamInfo<std::string>& info) { return info.param; }

}  // namespace dmuon::kernels

#endif  // DMUON_TESTS_KERNELS_RUNNER_H_
