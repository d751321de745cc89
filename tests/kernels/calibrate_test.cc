#include "kernels/newton_schulz/calibrate.h"

#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/newton_schulz/form.h"

namespace dmuon::kernels {
namespace {

CalibrationPlan Small() {
  CalibrationPlan plan;
  plan.sides = {64, 96};
  plan.aspects = {1, 2};
  plan.each = absl::ZeroDuration();
  return plan;
}

class EachKernel : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    auto backend = CreateCpuBackend({.threads = 1, .kernel = GetParam()});
    if (!backend.ok()) GTEST_SKIP() << backend.status();
    backend_ = *std::move(backend);
  }
  std::unique_ptr<Backend> backend_;
};

INSTANTIATE_TEST_SUITE_P(Cpu, EachKernel,
                         testing::ValuesIn(std::vector<std::string>(CpuKernelNames().begin(),
                                                                    CpuKernelNames().end())),
                         [](const auto& info) { return info.param; });

TEST_P(EachKernel, MeasuresBothFormsOnEveryShapeInEachPrecisionThatRuns) {
  std::vector<CalibrationPoint> points;
  const auto table = Calibrate(*backend_, Small(), [&](const CalibrationPoint& point) {
    points.push_back(point);
    return true;
  });
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_TRUE(Check(*table).ok());
  const size_t precisions = GetParam() == "avx512_bf16" ? 2 : 1;
  ASSERT_EQ(table->series.size(), precisions);
  EXPECT_EQ(points.size(), 4 * precisions);
  NewtonSchulzOptions options;
  const CostSeries* by_default = FindSeries(*table, options);
  options.deterministic = true;
  const CostSeries* fp32 = FindSeries(*table, options);
  ASSERT_TRUE(by_default != nullptr && fp32 != nullptr);
  EXPECT_EQ(by_default == fp32, precisions == 1);
  // What it took is what the table says that it takes.
  const CalibrationPoint& last = points[3];
  EXPECT_EQ(last.rows, 96);
  EXPECT_EQ(last.cols, 192);
  EXPECT_NEAR(Seconds(*by_default, NsForm::kGram, {}, last.rows, last.cols), last.gram_seconds,
              1e-9 * last.gram_seconds);
  EXPECT_NEAR(Seconds(*by_default, NsForm::kDirect, {}, last.rows, last.cols), last.direct_seconds,
              1e-9 * last.direct_seconds);
}

TEST_P(EachKernel, TheFormThatTheTableChoosesIsTheOneThatRuns) {
  for (NsForm form : {NsForm::kGram, NsForm::kDirect}) {
    const FormRates rates = form == NsForm::kGram ? FormRates{1e9, 1e12} : FormRates{1e12, 1e9};
    NewtonSchulzOptions options;
    options.costs =
        std::make_shared<const CostTable>(CostTable{{{{std::nullopt}, {64}, {1}, {rates}}}, 1e10});
    for (int64_t cols : {128, 1024}) {
      const auto plan = PlanNewtonSchulz(*backend_, options, 128, cols);
      ASSERT_TRUE(plan.ok());
      EXPECT_EQ((*plan)->form(), form) << "128 x " << cols;
    }
  }
}

TEST(Calibrate, StopsAtOnceWhenItIsToldTo) {
  const auto backend = CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(backend.ok());
  int points = 0;
  const auto table = Calibrate(**backend, Small(), [&](const auto&) { return ++points < 2; });
  EXPECT_EQ(table.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(points, 2);
}

TEST(Calibrate, LeavesOutTheSidesThatWouldNotEndInTime) {
  const auto backend = CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(backend.ok());
  CalibrationPlan plan = Small();
  plan.patience = absl::ZeroDuration();
  const auto table = Calibrate(**backend, plan, [](const auto&) { return true; });
  ASSERT_TRUE(table.ok()) << table.status();
  for (const CostSeries& series : table->series) {
    EXPECT_THAT(series.sides, testing::ElementsAre(64));
    EXPECT_EQ(series.rates.size(), 2u);
  }
}

TEST(Calibrate, ASideThatTakesLongerThanItPromisedIsLeftOutTooAndEndsItThere) {
  const auto backend = CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(backend.ok());
  CalibrationPlan plan;
  plan.sides = {16, 32, 48};
  plan.aspects = {1, 2, 4};
  plan.each = absl::ZeroDuration();
  plan.patience = absl::Seconds(2);
  const absl::Time end = absl::Now() + plan.patience;
  int late = 0;  // points that were begun when time was over
  const auto table = Calibrate(**backend, plan, [&](const CalibrationPoint& point) {
    late += point.rows > 16 && absl::Now() > end;
    while (point.rows == 32 && absl::Now() <= end) {  // the machine is busy with something else
    }
    return true;
  });
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(late, 0);
  for (const CostSeries& series : table->series) {
    EXPECT_THAT(series.sides, testing::ElementsAre(16));
    EXPECT_EQ(series.rates.size(), 3u);
  }
}

}  // namespace
}  // namespace dmuon::kernels
