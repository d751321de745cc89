// Z3: weights and gradients live in a few windows, filled when a boundary is asked for.
#include <algorithm>
#include <set>

#include "client/session_impl.h"
#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kLayers = 6;

// Six equal layers, and the root with a window of its own.
client::OpenOptions DeepTable(const JobOptions& job, int rank) {
  client::OpenOptions options = LayerTable(job, rank, kLayers);
  options.boundaries.push_back({"", true});
  options.parameters.push_back({"head", {16, 32}, client::Route::kMuon, kLayers, {}});
  return options;
}

client::OptimizerOptions DeepOptimizer() {
  client::OptimizerOptions options = SmallOptimizer();
  options.parameters.assign(kLayers + 1, {.group = kMuonGroup});
  return options;
}

class Windows : public E2eTest {
 protected:
  std::vector<std::unique_ptr<Trainer>> StartDeep(const JobOptions& job) {
    auto started = OnRanks(job.world, [&](int r) {
      return Trainer::Start(endpoint(), DeepTable(job, r), DeepOptimizer());
    });
    std::vector<std::unique_ptr<Trainer>> ranks;
    for (auto& rank : started) {
      EXPECT_TRUE(rank.ok()) << rank.status();
      if (rank.ok()) ranks.push_back(*std::move(rank));
    }
    return ranks;
  }
};

TEST_F(Windows, HoldLessThanAllAndTheRootHasItsOwn) {
  auto z3 = StartDeep({.job = "z3", .z3 = true});
  auto z2 = StartDeep({.job = "z2"});
  ASSERT_EQ(z3.size() + z2.size(), 2u);
  const client::Session::Impl& windows = z3[0]->session().impl();
  const client::Session::Impl& resident = z2[0]->session().impl();
  // Sealed memory of the daemon or memory of this process's device: one of the two is empty.
  EXPECT_LT(windows.weight.bytes() + windows.device_weight.bytes(),
            resident.weight.bytes() + resident.device_weight.bytes());
  EXPECT_LT(windows.grad.bytes() + windows.device_grad.bytes(),
            resident.grad.bytes() + resident.device_grad.bytes());
  std::set<int> used;
  for (int b = 0; b < kLayers; ++b) {
    EXPECT_NE(z3[0]->session().window(b), z3[0]->session().window(kLayers));
    used.insert(z3[0]->session().window(b));
  }
  EXPECT_GE(used.size(), 2u) << "the next boundary is filled while this one is at work";
  EXPECT_LT(used.size(), static_cast<size_t>(kLayers));
}

TEST_F(Windows, GiveTheBitsOfResidentWeightsOnTwoRanks) {
  auto z3 = StartDeep({.job = "z3", .world = 2, .z3 = true});
  auto z2 = StartDeep({.job = "z2", .world = 2});
  ASSERT_EQ(z3.size() + z2.size(), 4u);
  ASSERT_TRUE(TrainAll(z3, 8).ok());
  ASSERT_TRUE(TrainAll(z2, 8).ok());
  for (int p = 0; p <= kLayers; ++p) EXPECT_EQ(*z3[1]->Weight(p), *z2[0]->Weight(p)) << p;
}

TEST_F(Windows, AreFilledForOneRankAlone) {
  auto ranks = StartDeep({.job = "evaluation", .world = 2, .z3 = true});
  ASSERT_EQ(ranks.size(), 2u);
  ASSERT_TRUE(TrainAll(ranks, 2).ok());
  // Only rank 1 evaluates; rank 0 does nothing at all meanwhile.
  for (int p = 0; p <= kLayers; ++p) {
    const auto weight = ranks[1]->Weight(p);
    ASSERT_TRUE(weight.ok()) << weight.status();
    EXPECT_EQ(*weight, *ranks[1]->Read(ranks[1]->parameters()[static_cast<size_t>(p)].name,
                                       client::StateKind::kWeight));
  }
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

TEST_F(Windows, ShowTheNewWeightsAfterAStepThoughNeverReleased) {
  auto ranks = StartDeep({.job = "held", .z3 = true});
  ASSERT_EQ(ranks.size(), 1u);
  client::Session& session = ranks[0]->session();
  ASSERT_TRUE(session.Materialize(kLayers).ok());
  float before = 0;
  ASSERT_TRUE(GetWeight(session, kLayers, &before, sizeof(before)).ok());
  ASSERT_TRUE(session.WaitGradWritable(kLayers).ok());
  const std::vector<float> gradient = Values(16 * 32, 3);
  ASSERT_TRUE(PutGradient(session, kLayers, gradient.data(), gradient.size() * sizeof(float)).ok());
  session.SetPresent(kLayers);
  ASSERT_TRUE(SendReady(session, kLayers).ok());
  session.EndBackward();
  ASSERT_TRUE(ranks[0]->Step().ok());
  ASSERT_TRUE(session.Materialize(kLayers).ok());
  float after = 0;
  ASSERT_TRUE(GetWeight(session, kLayers, &after, sizeof(after)).ok());
  EXPECT_NE(after, before);
  EXPECT_EQ(after, (*ranks[0]->Read("head", client::StateKind::kWeight))[0]);
  ASSERT_TRUE(session.Release(kLayers).ok());
}

TEST_F(Windows, AreHeldByOneBoundaryAtATime) {
  auto ranks = StartDeep({.job = "two", .z3 = true});
  ASSERT_EQ(ranks.size(), 1u);
  client::Session& session = ranks[0]->session();
  int first = 0, second = 1;
  while (session.window(second) != session.window(first)) ++second;
  ASSERT_LT(second, kLayers);
  ASSERT_TRUE(session.Materialize(first).ok());
  const absl::Status refused = session.Materialize(second);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("held by boundary 'layers.0'"));
  ASSERT_TRUE(session.Release(first).ok());
  EXPECT_TRUE(session.Materialize(second).ok());
  ASSERT_TRUE(session.Release(second).ok());
}

TEST_F(Windows, TakeSeveralMicrosThroughOneWindow) {
  auto z3 = StartDeep({.job = "z3", .world = 2, .z3 = true});
  auto z2 = StartDeep({.job = "z2", .world = 2});
  ASSERT_EQ(z3.size() + z2.size(), 4u);
  for (auto* job : {&z3, &z2}) {
    const auto results = OnRanks(2, [&](int r) -> absl::Status {
      Trainer& rank = *(*job)[static_cast<size_t>(r)];
      for (uint64_t micro = 0; micro < 4; ++micro) {
        const absl::Status status = rank.Backward(50 + micro, r);
        if (!status.ok()) return status;
      }
      return rank.Step().status();
    });
    for (const absl::Status& status : results) ASSERT_TRUE(status.ok()) << status;
  }
  for (int p = 0; p <= kLayers; ++p) EXPECT_EQ(*z3[0]->Weight(p), *z2[1]->Weight(p)) << p;
}

}  // namespace
}  // namespace dmuon::testing
