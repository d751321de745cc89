// Steps over the real daemon: what ranks may do, and what they are told when they differ.
#include <limits>

#include "base/status_macros.h"
#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class StepE2e : public E2eTest {
 protected:
  StepE2e() : StepE2e(Options{.daemon_flags = {"--step-timeout-seconds", "0.5"}}) {}
  explicit StepE2e(const Options& options) : E2eTest(options) {}

  using Ranks = std::vector<std::unique_ptr<Trainer>>;
  static std::vector<absl::StatusOr<client::StepResult>> StepAll(
      Ranks& ranks, const client::StepOptions& options = {}) {
    return OnRanks(static_cast<int>(ranks.size()),
                   [&](int r) { return ranks[static_cast<size_t>(r)]->Step(options); });
  }
  static void BackwardAll(Ranks& ranks) {
    for (auto& rank : ranks) ASSERT_TRUE(rank->Backward().ok());
  }
  // All weights as the daemon keeps them, one after the other.
  static std::vector<float> State(Trainer& rank) {
    std::vector<float> all;
    for (const client::Parameter& p : rank.parameters()) {
      auto values = rank.Read(p.name, client::StateKind::kWeight);
      if (!values.ok()) return {};
      all.insert(all.end(), values->begin(), values->end());
    }
    return all;
  }
};

TEST_F(StepE2e, RanksAgreeBitForBitAndArenasShowWhatTheDaemonKeeps) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  ASSERT_TRUE(TrainAll(ranks, 5).ok());
  for (int p = 0; p < 4; ++p) {
    const auto kept = ranks[0]->Read(ranks[0]->parameters()[static_cast<size_t>(p)].name,
                                     client::StateKind::kWeight);
    const auto a = ranks[0]->Weight(p), b = ranks[1]->Weight(p);
    ASSERT_TRUE(kept.ok() && a.ok() && b.ok());
    EXPECT_EQ(*kept, *a);
    EXPECT_EQ(*a, *b);
  }
}

TEST_F(StepE2e, ASteadyStepMakesNoGrpcCall) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  const uint64_t before = ranks[0]->connection().grpc_calls();
  ASSERT_TRUE(TrainAll(ranks, 10).ok());
  EXPECT_EQ(ranks[0]->connection().grpc_calls(), before);
  const auto profile = ranks[0]->session().LastProfile();
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ(profile->step, 10u);
  EXPECT_GT(profile->total, 0);
  EXPECT_EQ(profile->newton_schulz_calls, 2);
}

TEST_F(StepE2e, ARankThatStepsOnceMoreThanTheOthersIsToldWhoIsMissingAndMayRetry) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  ASSERT_TRUE(TrainAll(ranks, 2).ok());
  ASSERT_TRUE(ranks[0]->Backward().ok());
  const auto lonely = ranks[0]->Step();
  EXPECT_EQ(lonely.status().code(), absl::StatusCode::kDeadlineExceeded) << lonely.status();
  EXPECT_THAT(std::string(lonely.status().message()), HasSubstr("rank(s) 1 "));
  EXPECT_EQ(ranks[0]->session().step(), 2u);
  // The same step id, once all are there. The one that came late is told that the step was given up, and runs it again.
  const auto results = OnRanks(2, [&](int r) -> absl::StatusOr<client::StepResult> {
    Trainer& rank = *ranks[static_cast<size_t>(r)];
    RETURN_IF_ERROR(rank.Backward());
    auto result = rank.Step();
    if (absl::IsAborted(result.status())) {
      RETURN_IF_ERROR(rank.Backward());
      result = rank.Step();
    }
    return result;
  });
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, 3u);
  }
}

TEST_F(StepE2e, ARankThatHasLeftIsNamedAtEachAttemptAndNobodyWaitsForIt) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  ASSERT_TRUE(ranks[1]->session().Close().ok());
  for (int attempt = 0; attempt < 2; ++attempt) {
    ASSERT_TRUE(ranks[0]->Backward().ok());
    const auto result = ranks[0]->Step();
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("rank 1 has closed its session"));
  }
  EXPECT_TRUE(ranks[0]->session().Close().ok());
}

TEST_F(StepE2e, HyperparametersThatDifferNameGroupAndRanksAndChangeNothing) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  const std::vector<float> before = State(*ranks[0]);
  BackwardAll(ranks);
  const auto results = OnRanks(2, [&](int r) {
    client::Session& session = ranks[static_cast<size_t>(r)]->session();
    session.SetHyper(kAdamwGroup, {.lr = r == 0 ? 0.003 : 0.004});
    return session.Step({});
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
    EXPECT_THAT(std::string(result.status().message()),
                AllOf(HasSubstr("'vectors'"), HasSubstr("rank(s) 1 ")));
  }
  EXPECT_EQ(State(*ranks[0]), before);
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
  EXPECT_EQ(ranks[1]->session().step(), 2u);
}

TEST_F(StepE2e, DifferentNumbersOfBackwardPassesAreRefused) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  BackwardAll(ranks);
  ASSERT_TRUE(ranks[1]->Backward().ok());
  for (const auto& result : StepAll(ranks)) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr("backward passes"));
  }
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

TEST_F(StepE2e, DifferentClipNormsAreRefused) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  BackwardAll(ranks);
  const auto results =
      OnRanks(2, [&](int r) { return ranks[static_cast<size_t>(r)]->Step({.max_norm = 1.0 + r}); });
  for (const auto& result : results)
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

TEST_F(StepE2e, ABackwardDroppedOnAllRanksLeavesNoTrace) {
  Ranks dropped = StartAll(endpoint(), {.job = "dropped", .world = 2});
  Ranks plain = StartAll(endpoint(), {.job = "plain", .world = 2});
  for (auto& rank : dropped) {
    ASSERT_TRUE(rank->Backward(999, rank->rank()).ok());
    ASSERT_TRUE(rank->session().Discard().ok());
  }
  ASSERT_TRUE(TrainAll(dropped, 3).ok());
  ASSERT_TRUE(TrainAll(plain, 3).ok());
  EXPECT_EQ(State(*dropped[0]), State(*plain[0]));
}

TEST_F(StepE2e, ABackwardDroppedOnOneRankFailsTheNextStepByNameAndTheOneAfterGoesOn) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  const std::vector<float> before = State(*ranks[0]);
  BackwardAll(ranks);
  ASSERT_TRUE(ranks[1]->session().Discard().ok());
  ASSERT_TRUE(ranks[1]->Backward().ok());
  for (const auto& result : StepAll(ranks)) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
    EXPECT_THAT(std::string(result.status().message()),
                AllOf(HasSubstr("zero_grad"), HasSubstr("rank(s) 1: ")));
  }
  EXPECT_EQ(State(*ranks[0]), before);
  EXPECT_TRUE(TrainAll(ranks, 2).ok());
  EXPECT_EQ(ranks[0]->session().step(), 3u);
}

TEST_F(StepE2e, ANonfiniteGradientOnOneRankSkipsTheStepOnAll) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  const std::vector<float> before = State(*ranks[0]);
  ASSERT_TRUE(ranks[0]->Backward().ok());
  ASSERT_TRUE(ranks[1]->Backward().ok());
  const auto results =
      OnRanks(2, [&](int r) { return ranks[static_cast<size_t>(r)]->Step({.found_inf = r == 1}); });
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_FALSE(result->applied);
    EXPECT_EQ(result->step, 2u);
  }
  EXPECT_EQ(State(*ranks[0]), before);
  // The same through the gradient itself.
  for (auto& rank : ranks) {
    ASSERT_TRUE(rank->session().WaitAllWeights().ok());
    ASSERT_TRUE(rank->session().WaitGradWritable(0).ok());
    const float gradient = rank->rank() == 0 ? std::numeric_limits<float>::quiet_NaN() : 0.5f;
    ASSERT_TRUE(PutGradient(rank->session(), 0, &gradient, sizeof(gradient)).ok());
    rank->session().SetPresent(0);
    ASSERT_TRUE(SendReady(rank->session(), 0).ok());
    rank->session().EndBackward();
  }
  for (const auto& result : StepAll(ranks)) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_FALSE(result->applied);
  }
  EXPECT_EQ(State(*ranks[0]), before);
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  EXPECT_NE(State(*ranks[0]), before);
}

TEST_F(StepE2e, AParameterWithoutGradientAnywhereKeepsItsWeights) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  const auto before = ranks[0]->Read("layers.0.weight", client::StateKind::kWeight);
  for (auto& rank : ranks) {
    ASSERT_TRUE(rank->session().WaitGradWritable(1).ok());
    rank->session().SetPresent(2);
    ASSERT_TRUE(rank->session().Ready(1).ok());
    rank->session().EndBackward();
  }
  for (const auto& result : StepAll(ranks)) ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(*ranks[0]->Read("layers.0.weight", client::StateKind::kWeight), *before);
}

TEST_F(StepE2e, SeveralMicroBatchesAreOneLargeOne) {
  Ranks once = StartAll(endpoint(), {.job = "once"});
  Ranks thrice = StartAll(endpoint(), {.job = "thrice"});
  client::Session& session = thrice[0]->session();
  // Powers of two: their sums are exact, so the bits must be the same.
  const float parts[] = {0.25f, 0.5f, 1.0f};
  for (float part : parts) {
    for (int b : {1, 0}) {
      ASSERT_TRUE(session.WaitGradWritable(b).ok());
      for (int p : {2 * b, 2 * b + 1}) {
        std::vector<float> g(
            static_cast<size_t>(Elements(thrice[0]->parameters()[static_cast<size_t>(p)])));
        for (size_t i = 0; i < g.size(); i += 7) g[i] = part;
        ASSERT_TRUE(PutGradient(session, p, g.data(), g.size() * sizeof(float)).ok());
        session.SetPresent(p);
      }
      ASSERT_TRUE(SendReady(session, b).ok());
    }
    session.EndBackward();
  }
  ASSERT_TRUE(thrice[0]->Step().ok());
  client::Session& single = once[0]->session();
  for (int p = 0; p < 4; ++p) {
    std::vector<float> g(
        static_cast<size_t>(Elements(once[0]->parameters()[static_cast<size_t>(p)])));
    for (size_t i = 0; i < g.size(); i += 7) g[i] = 1.75f;
    ASSERT_TRUE(PutGradient(single, p, g.data(), g.size() * sizeof(float)).ok());
    single.SetPresent(p);
  }
  for (int b : {1, 0}) ASSERT_TRUE(SendReady(single, b).ok());
  single.EndBackward();
  ASSERT_TRUE(once[0]->Step().ok());
  EXPECT_EQ(State(*once[0]), State(*thrice[0]));
}

TEST_F(StepE2e, TwoJobsAtOnceDoNotDisturbEachOther) {
  const JobOptions a{.job = "a", .world = 2}, b{.job = "b", .world = 2, .z3 = true},
      alone{.job = "alone", .world = 2};
  Ranks ranks_a = StartAll(endpoint(), a), ranks_b = StartAll(endpoint(), b);
  absl::Status trained_b;
  std::thread other([&] { trained_b = TrainAll(ranks_b, 30); });
  const absl::Status trained_a = TrainAll(ranks_a, 30);
  other.join();
  ASSERT_TRUE(trained_a.ok()) << trained_a;
  ASSERT_TRUE(trained_b.ok()) << trained_b;
  Ranks ranks_alone = StartAll(endpoint(), alone);
  ASSERT_TRUE(TrainAll(ranks_alone, 30).ok());
  EXPECT_EQ(State(*ranks_a[0]), State(*ranks_alone[0]));
  EXPECT_EQ(State(*ranks_b[0]), State(*ranks_alone[0]));
}

TEST_F(StepE2e, WrittenWeightsReachAllRanksAtTheSameVersion) {
  Ranks ranks = StartAll(endpoint(), {.world = 2});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  const std::vector<float> values = Values(24 * 16, 42);
  ASSERT_TRUE(ranks[0]
                  ->session()
                  .WriteState("layers.0.weight", client::StateKind::kWeight,
                              absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                                                  values.size() * sizeof(float)))
                  .ok());
  for (auto& rank : ranks) {
    EXPECT_EQ(*rank->Read("layers.0.weight", client::StateKind::kWeight), values);
    EXPECT_TRUE(Eventually([&] { return *rank->Weight(0) == values; }));
  }
}

TEST_F(StepE2e, StateOfAnUnknownNameKindOrSizeIsRefused) {
  Ranks ranks = StartAll(endpoint(), {});
  client::Session& session = ranks[0]->session();
  EXPECT_EQ(session.ReadState("layers.9.weight", client::StateKind::kWeight).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(session.ReadState("layers.0.weight", client::StateKind::kExpAvg).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::vector<std::byte> wrong(100);
  const absl::Status written =
      session.WriteState("layers.0.weight", client::StateKind::kWeight, wrong);
  EXPECT_EQ(written.code(), absl::StatusCode::kInvalidArgument) << written;
  EXPECT_THAT(std::string(written.message()), AllOf(HasSubstr("1536"), HasSubstr("100")));
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

}  // namespace
}  // namespace dmuon::testing
