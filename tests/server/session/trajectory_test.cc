// A thousand steps of the whole optimizer over real workers, held against float64: both routes, schedules, decay,
// clipping, accumulation, gradients that are missing on one rank or on all, and steps that are skipped.

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "tests/server/session/reference.h"

namespace dmuon::server {
namespace {

using testing::ExpectAllOk;
using testing::Gaussian;
using testing::LocalTrainer;
using testing::Matrix64;
using testing::OnRanks;
using testing::RelativeError;
using testing::SmallReference;
using testing::SmallTable;

constexpr int kSteps = 1000;
constexpr int kRanks = 2;
constexpr double kBound = 1e-5;  // relative Frobenius, of each parameter's weight
constexpr double kMaxNorm = 17;  // about the norm of the mean of two Gaussians of this table

// What rank r does at a step. Every rule meets every other one sooner or later.
struct StepPlan {
  explicit StepPlan(int number) : step(number) {}
  const int step;

  uint32_t micros() const { return step % 7 == 0 ? 2 : 1; }
  bool inf_on(int rank) const { return step % 50 == 0 && rank == 1; }
  bool sends(int rank, uint32_t boundary) const {
    if (boundary == 1 && step % 37 == 0) return false;                // nobody has it
    return !(boundary == 0 && step % 41 == 0 && rank == kRanks - 1);  // one rank has none
  }
  // From a tenth of the usual size to ten times it.
  double gradient_size() const { return std::pow(10, std::sin(step * 0.05)); }

  // Warm-up, then half a cosine; momentum rises, and decay changes half-way.
  std::array<wire::GroupHyper, 2> groups() const {
    const double warm = std::min(1.0, step / 100.0);
    const double rate = warm * 0.5 * (1 + std::cos(M_PI * step / (kSteps + 1)));
    return {{{.lr = 0.02 * rate,
              .weight_decay = step < kSteps / 2 ? 0.1 : 0.01,
              .momentum = 0.85 + 0.1 * warm},
             {.lr = 1e-3 * rate, .weight_decay = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}}};
  }
};

std::vector<float> GradientOf(const StepPlan& plan, size_t parameter, int rank, uint32_t micro) {
  const Parameter p = SmallTable().parameters[parameter];
  std::vector<float> g =
      Gaussian(p.numel(), 1 + parameter + 10 * rank + 100 * micro + 1000 * plan.step);
  for (float& x : g) x *= static_cast<float>(plan.gradient_size());
  if (plan.inf_on(rank) && static_cast<int>(parameter) == plan.step / 50 % 4) {
    g.back() = std::numeric_limits<float>::infinity();
  }
  return g;
}

absl::Status TrainStep(LocalTrainer& t, const StepPlan& plan) {
  const auto groups = plan.groups();
  std::copy(groups.begin(), groups.end(), t.page().groups().begin());
  const ParameterTable table = SmallTable();
  for (uint32_t micro = 0; micro < plan.micros(); ++micro) {
    for (uint32_t b = 0; b < table.boundaries.size(); ++b) {
      if (!plan.sends(t.rank(), b)) continue;
      if (micro > 0) RETURN_IF_ERROR(t.AwaitConsumed(b, micro - 1));
      for (size_t p = 0; p < table.parameters.size(); ++p) {
        if (table.parameters[p].boundary != BoundaryId(static_cast<int>(b))) continue;
        t.SetGrad(static_cast<int>(p), GradientOf(plan, p, t.rank(), micro));
      }
      t.Ready(b, micro);
    }
  }
  return t.Step(plan.step, plan.micros(), 0, kMaxNorm);
}

std::vector<Matrix64> MeanGradients(const StepPlan& plan) {
  const ParameterTable table = SmallTable();
  std::vector<Matrix64> mean(table.parameters.size());
  for (size_t p = 0; p < mean.size(); ++p) {
    for (int rank = 0; rank < kRanks; ++rank) {
      if (!plan.sends(rank, table.parameters[p].boundary.value())) continue;
      mean[p].resize(table.parameters[p].numel(), 0);
      for (uint32_t micro = 0; micro < plan.micros(); ++micro) {
        const std::vector<float> g = GradientOf(plan, p, rank, micro);
        for (size_t i = 0; i < g.size(); ++i) mean[p][i] += g[i] / double{kRanks};
      }
    }
  }
  return mean;
}

class TrajectoryTest : public testing::SessionTest {
 protected:
  // Trains, with the float64 reference beside it, and holds every parameter and its momentum to it.
  void Follow(kernels::NsForm form) {
    OptimizerSpec optimizer = testing::SmallOptimizer();
    optimizer.newton_schulz.form = form;
    auto trainers = Start("trajectory", kRanks, /*z3=*/false, optimizer);
    std::vector<uint32_t> flags;
    ExpectAllOk(OnRanks(kRanks, [&](int r) {
      for (int step = 1; step <= kSteps; ++step) {
        RETURN_IF_ERROR(TrainStep(*trainers[r], StepPlan(step)));
        if (r == 0) flags.push_back(trainers[r]->page().header().verdict.flags);
      }
      return absl::OkStatus();
    }));
    ASSERT_EQ(flags.size(), size_t{kSteps});

    SmallReference reference;
    int clipped = 0, skipped = 0;
    for (int step = 1; step <= kSteps; ++step) {
      const StepPlan plan(step);
      const auto outcome = reference.Step(MeanGradients(plan), plan.groups(), kMaxNorm);
      clipped += outcome.clip_coefficient < 1;
      skipped += !outcome.applied;
      ASSERT_EQ((flags[step - 1] & wire::kApplied) != 0, outcome.applied) << "step " << step;
      if (outcome.applied) {
        ASSERT_EQ((flags[step - 1] & wire::kClipped) != 0, outcome.clip_coefficient < 1)
            << "step " << step;
      }
    }
    printf("%d steps, %d clipped, %d skipped\n", kSteps, clipped, skipped);
    EXPECT_EQ(skipped, kSteps / 50);
    EXPECT_GT(clipped, kSteps / 4);
    EXPECT_LT(clipped, kSteps * 3 / 4);
    ExpectNear(*trainers[0], reference);
  }

 private:
  static void ExpectNear(LocalTrainer& t, const SmallReference& reference) {
    double worst = 0;
    std::string where;
    const ParameterTable table = SmallTable();
    for (size_t p = 0; p < table.parameters.size(); ++p) {
      const bool muon = table.parameters[p].route == Route::kMuon;
      const std::string& name = table.parameters[p].name;
      const auto weight = t.Read(name, StateKind::kWeight);
      const auto momentum = t.Read(name, muon ? StateKind::kMomentum : StateKind::kExpAvg);
      ASSERT_TRUE(weight.ok() && momentum.ok());
      const double error = RelativeError(*weight, reference.weight(p));
      const double momentum_error = RelativeError(*momentum, reference.momentum(p));
      printf("  %-12s weight %.2g, momentum %.2g\n", name.c_str(), error, momentum_error);
      EXPECT_LE(error, kBound) << name;
      EXPECT_LE(momentum_error, 1e-6) << name;
      if (error > worst) worst = error, where = name;
    }
    printf("worst: '%s' %.2g, bound %.0e\n", where.c_str(), worst, kBound);
  }
};

TEST_F(TrajectoryTest, AThousandStepsOfTheDirectFormFollowFloat64) {
  Follow(kernels::NsForm::kDirect);
}

TEST_F(TrajectoryTest, AThousandStepsOfTheGramFormFollowFloat64) { Follow(kernels::NsForm::kGram); }

}  // namespace
}  // namespace dmuon::server
