// Whole trajectories through client and daemon, held against the float64 step of docs/numerics.md.
#include <cstring>

#include "tests/e2e/e2e_test_base.h"
#include "tests/support/local_trainer.h"

namespace dmuon::testing {
namespace {

using server::testing::Adamw64;
using server::testing::Matrix64;
using server::testing::Muon64;
using server::testing::RelativeError;

constexpr int kSteps = 20;

class Trajectory : public E2eTest {
 protected:
  // The mean gradient over the ranks of a step.
  static Matrix64 MeanGradient(const client::Parameter& p, int index, int world, uint64_t step) {
    Matrix64 mean(static_cast<size_t>(Elements(p)), 0);
    for (int rank = 0; rank < world; ++rank) {
      const std::vector<float> g = Gradient(p, index, rank, step);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += g[i] / static_cast<double>(world);
    }
    return mean;
  }
  static Matrix64 Reference(const client::Parameter& p, int index, int world) {
    const std::vector<float> initial = InitialValues(p, index);
    Matrix64 weight(initial.begin(), initial.end());
    if (p.route == client::Route::kMuon) {
      Muon64 muon{p.shape[0], p.shape[1], weight, {}};
      for (int step = 1; step <= kSteps; ++step) {
        muon.Step(MeanGradient(p, index, world, static_cast<uint64_t>(step)), kMuonHyper.lr,
                  kMuonHyper.momentum, kMuonHyper.weight_decay);
      }
      return muon.weight;
    }
    Adamw64 adamw{weight, {}, {}};
    for (int step = 1; step <= kSteps; ++step) {
      adamw.Step(MeanGradient(p, index, world, static_cast<uint64_t>(step)), kAdamwHyper.lr,
                 kAdamwHyper.beta1, kAdamwHyper.beta2, kAdamwHyper.eps, kAdamwHyper.weight_decay);
    }
    return adamw.weight;
  }
  // Final weights of all parameters, as the first rank reads them.
  std::vector<std::vector<float>> Run(
      const JobOptions& job, const client::OptimizerOptions& optimizer = SmallOptimizer()) {
    auto started = OnRanks(job.world, [&](int rank) {
      return Trainer::Start(endpoint(), SmallTable(job, rank), optimizer);
    });
    std::vector<std::unique_ptr<Trainer>> ranks;
    for (auto& rank : started) {
      EXPECT_TRUE(rank.ok()) << rank.status();
      if (!rank.ok()) return {};
      ranks.push_back(*std::move(rank));
    }
    const absl::Status trained = TrainAll(ranks, kSteps);
    EXPECT_TRUE(trained.ok()) << trained;
    forms_ = ranks[0]->session().LastProfile()->forms;
    std::vector<std::vector<float>> weights;
    for (const client::Parameter& p : ranks[0]->parameters()) {
      auto values = ranks[0]->Read(p.name, client::StateKind::kWeight);
      EXPECT_TRUE(values.ok()) << values.status();
      weights.push_back(values.value_or(std::vector<float>()));
    }
    return weights;
  }
  std::string forms_;  // of the last run

  static void ExpectNear(const std::vector<std::vector<float>>& weights, int world, double bound) {
    const auto parameters = SmallTable({}, 0).parameters;
    ASSERT_EQ(weights.size(), parameters.size());
    for (size_t p = 0; p < weights.size(); ++p) {
      const double error =
          RelativeError(weights[p], Reference(parameters[p], static_cast<int>(p), world));
      printf("%d rank(s), %s: relative error %.2g\n", world, parameters[p].name.c_str(), error);
      EXPECT_LE(error, bound) << parameters[p].name;
    }
  }
};

TEST_F(Trajectory, DirectOnOneAndTwoRanksFollowsFloat64) {
  for (int world : {1, 2}) ExpectNear(Run({.job = "direct", .world = world}), world, 1e-5);
}

TEST_F(Trajectory, GramWhereItPaysFollowsFloat64) {
  client::OptimizerOptions gram = SmallOptimizer();
  gram.newton_schulz.form = client::NsForm::kGram;
  ExpectNear(Run({.job = "gram", .world = 2}, gram), 2, 1e-4);
  EXPECT_EQ(forms_, "gram 1, direct 1");  // 8 x 24 is wide enough, 24 x 16 is not
}

TEST_F(Trajectory, WindowsGiveTheBitsOfResidentWeights) {
  for (int world : {1, 2}) {
    EXPECT_EQ(Run({.job = "z2", .world = world}), Run({.job = "z3", .world = world, .z3 = true}))
        << world;
  }
}

TEST_F(Trajectory, ARunRepeatsBitForBit) {
  EXPECT_EQ(Run({.job = "one", .world = 2}), Run({.job = "two", .world = 2}));
}

TEST_F(Trajectory, APublishedBf16WeightIsTheRoundedMaster) {
  client::OptimizerOptions bf16 = SmallOptimizer();
  for (client::ParameterConfig& config : bf16.parameters) config.param_dtype = client::Dtype::kBF16;
  auto rank = Trainer::Start(endpoint(), SmallTable({.job = "bf16"}, 0), bf16);
  ASSERT_TRUE(rank.ok()) << rank.status();
  ASSERT_TRUE((*rank)->Train(3).ok());
  ASSERT_TRUE((*rank)->session().WaitAllWeights().ok());
  const auto master = (*rank)->Read("layers.0.weight", client::StateKind::kWeight);
  ASSERT_TRUE(master.ok());
  std::vector<uint16_t> published(master->size());
  ASSERT_TRUE(
      GetWeight((*rank)->session(), 0, published.data(), published.size() * sizeof(uint16_t)).ok());
  for (size_t i = 0; i < published.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &(*master)[i], sizeof(bits));
    const auto rounded =
        static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest even
    ASSERT_EQ(published[i], rounded) << i;
  }
}

TEST_F(Trajectory, MomentumAndMomentsAreReadAndWrittenBack) {
  const JobOptions job{.job = "resume", .world = 2};
  auto ranks = StartAll(endpoint(), job);
  ASSERT_TRUE(TrainAll(ranks, 5).ok());
  using client::StateKind;
  struct Saved {
    std::string name;
    StateKind kind;
    std::vector<std::byte> bytes;
  };
  std::vector<Saved> saved;
  for (const client::Parameter& p : ranks[0]->parameters()) {
    std::vector<StateKind> kinds = {StateKind::kWeight, StateKind::kMomentum};
    if (p.route == client::Route::kAdamw) {
      kinds = {StateKind::kWeight, StateKind::kExpAvg, StateKind::kExpAvgSq, StateKind::kStep};
    }
    for (StateKind kind : kinds) {
      auto bytes = ranks[0]->session().ReadState(p.name, kind);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      saved.push_back({p.name, kind, *std::move(bytes)});
    }
  }
  // Another job, begun from what was saved, goes on with the same bits.
  auto resumed = StartAll(endpoint(), {.job = "resumed", .world = 2});
  for (const Saved& s : saved)
    ASSERT_TRUE(resumed[0]->session().WriteState(s.name, s.kind, s.bytes).ok()) << s.name;
  const auto both = [&](std::vector<std::unique_ptr<Trainer>>& job_ranks) {
    const auto results = OnRanks(2, [&](int r) -> absl::Status {
      Trainer& rank = *job_ranks[static_cast<size_t>(r)];
      const absl::Status backward = rank.Backward(6, r);
      return backward.ok() ? rank.Step().status() : backward;
    });
    for (const absl::Status& status : results) EXPECT_TRUE(status.ok()) << status;
  };
  both(ranks);
  both(resumed);
  for (const client::Parameter& p : ranks[0]->parameters()) {
    EXPECT_EQ(*ranks[0]->Read(p.name, StateKind::kWeight),
              *resumed[1]->Read(p.name, StateKind::kWeight))
        << p.name;
  }
}

}  // namespace
}  // namespace dmuon::testing
