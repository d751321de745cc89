// A step over real workers and arenas: the numbers, the protocol, and what a broken rank does to the others.

#include "absl/strings/match.h"
#include "tests/server/session/step_fixture.h"

namespace dmuon::server {
namespace {

using ::testing::AllOf;
using testing::ExpectAllOk;
using ::testing::HasSubstr;
using testing::LocalTrainer;
using testing::Matrix64;
using ::testing::Not;
using testing::OnRanks;
using testing::RelativeError;
using testing::SmallReference;
using testing::SmallTable;
using testing::StepTest;
using testing::Trainers;

TEST_F(StepTest, TwentyStepsFollowTheFloat64Reference) {
  for (int ranks : {1, 2, 3}) {
    Trainers trainers = Start("reference", ranks);
    SmallReference reference;
    const ParameterTable table = SmallTable();
    for (int step = 1; step <= 20; ++step) {
      ExpectAllOk(StepAll(trainers, step));
      std::vector<Matrix64> mean;
      for (size_t p = 0; p < table.parameters.size(); ++p) {
        Matrix64& g = mean.emplace_back(table.parameters[p].numel(), 0);
        for (int r = 0; r < ranks; ++r) {
          const std::vector<float> x = GradOf(static_cast<int>(p), r, step);
          for (size_t i = 0; i < g.size(); ++i) g[i] += x[i] / double(ranks);
        }
      }
      reference.Step(std::move(mean), trainers[0]->page().groups());
    }
    for (auto& t : trainers) {
      for (size_t p = 0; p < table.parameters.size(); ++p) {
        const bool muon = table.parameters[p].route == Route::kMuon;
        EXPECT_LE(RelativeError(t->Weight(static_cast<int>(p), table.parameters[p].numel()),
                                reference.weight(p)),
                  muon ? 1e-5 : 1e-6)
            << ranks << " ranks, " << table.parameters[p].name;
      }
    }
    ExpectAllOk(OnRanks(ranks, [&](int r) { return trainers[r]->Close(); }));
  }
}

TEST_F(StepTest, WindowsGiveTheSameBitsAsResidentWeights) {
  Trainers resident = Start("z2", 2);
  Trainers windowed = Start("z3", 2, /*z3=*/true);
  for (int step = 1; step <= 3; ++step) {
    ExpectAllOk(StepAll(resident, step));
    ExpectAllOk(OnRanks(2, [&](int r) {
      RETURN_IF_ERROR(SendGradsZ3(*windowed[r], step));
      return windowed[r]->Step(step);
    }));
  }
  for (int r = 0; r < 2; ++r) {
    const ParameterTable table = SmallTable();
    for (uint32_t b = 0; b < 3; ++b) {
      ASSERT_TRUE(windowed[r]->Materialize(b).ok());
      for (int p = 0; p < 4; ++p) {
        if (table.parameters[p].boundary.index() != b) continue;
        const size_t n = table.parameters[p].numel();
        EXPECT_EQ(windowed[r]->Weight(p, n), resident[r]->Weight(p, n)) << table.parameters[p].name;
      }
      windowed[r]->Release(b);
    }
  }
}

TEST_F(StepTest, MicrosAreSummedInOrder) {
  Trainers once = Start("once", 2);
  Trainers twice = Start("twice", 2);
  // The sum of two micros is exact in fp32 when one of them is zero: the same bits as sending it once.
  ExpectAllOk(StepAll(once, 1));
  ExpectAllOk(OnRanks(2, [&](int r) {
    LocalTrainer& t = *twice[r];
    SendGrads(t, 1);
    for (uint32_t b = 0; b < 3; ++b) RETURN_IF_ERROR(t.AwaitConsumed(b, 0));
    for (int p = 0; p < 4; ++p)
      t.SetGrad(p, std::vector<float>(SmallTable().parameters[p].numel(), 0));
    for (uint32_t b = 0; b < 3; ++b) t.Ready(b, 1);
    return t.Step(1, /*micros=*/2);
  }));
  for (int p = 0; p < 4; ++p) EXPECT_EQ(Master(*once[0], p), Master(*twice[0], p));
}

TEST_F(StepTest, GradientsThatComeBeforeTheWeightsDoNotDisturbTheStepUnderWay) {
  // One rank, so that nothing but the step under way keeps its worker from reading what comes.
  Trainers patient = Start("patient", 1);
  Trainers hasty = Start("hasty", 1);
  constexpr int kSteps = 300;
  for (int step = 1; step <= kSteps; ++step) ExpectAllOk(StepAll(patient, step));
  for (int step = 1; step <= kSteps; ++step) {
    SendGrads(*hasty[0], step);  // right behind the verdict of the step before, beside its update
    hasty[0]->PushStep(step);
    ASSERT_TRUE(hasty[0]->AwaitVerdict().ok());
  }
  for (int p = 0; p < 4; ++p) EXPECT_EQ(Master(*hasty[0], p), Master(*patient[0], p)) << p;
}

TEST_F(StepTest, ARankInBackwardDoesNotWaitForOneThatHasDiscardedOrStepped) {
  Trainers trainers = Start("ahead", 2);
  for (const bool discards : {true, false}) {
    const int step = 1;
    const auto status = OnRanks(2, [&](int r) -> absl::Status {
      LocalTrainer& t = *trainers[r];
      SendGrads(t, step);
      if (r == 1) {
        if (discards) t.Discard();
        return t.Step(step, /*micros=*/1);
      }
      for (uint32_t micro = 1; micro < 3; ++micro) {
        for (uint32_t b = 0; b < 3; ++b) RETURN_IF_ERROR(t.AwaitConsumed(b, micro - 1));
        SendGrads(t, step, static_cast<int>(micro));
      }
      return t.Step(step, /*micros=*/3);
    });
    for (const absl::Status& s : status)
      EXPECT_EQ(s.code(), absl::StatusCode::kFailedPrecondition) << s;
  }
  ExpectAllOk(StepAll(trainers, 1));
}

TEST_F(StepTest, AParameterWithoutGradientKeepsItsBytesAndARankWithoutCountsAsZeros) {
  Trainers trainers = Start("missing", 2);
  const std::vector<float> before = Master(*trainers[0], 0);
  ExpectAllOk(OnRanks(2, [&](int r) {
    LocalTrainer& t = *trainers[r];
    if (r == 0) t.SetGrad(2, GradOf(2, 0, 1));
    if (r == 0) t.Ready(1);  // rank 1 sends nothing at all
    return t.Step(1);
  }));
  EXPECT_EQ(Master(*trainers[0], 0), before);
  EXPECT_EQ(*trainers[0]->Read("layers.0.w", StateKind::kMomentum), std::vector<float>(240, 0));
  std::vector<float> half = GradOf(2, 0, 1);
  for (float& x : half) x /= 2;
  EXPECT_EQ(*trainers[1]->Read("layers.1.w", StateKind::kMomentum), half);
}

TEST_F(StepTest, AnInfOnOneRankSkipsTheStepOnAllAndKeepsStateBytes) {
  Trainers trainers = Start("inf", 2);
  ExpectAllOk(StepAll(trainers, 1));
  const std::vector<float> weight = Master(*trainers[0], 0);
  const std::vector<float> momentum = *trainers[0]->Read("layers.0.w", StateKind::kMomentum);
  ExpectAllOk(OnRanks(2, [&](int r) {
    LocalTrainer& t = *trainers[r];
    std::vector<float> g = GradOf(0, r, 2);
    if (r == 1) g[7] = std::numeric_limits<float>::infinity();
    t.SetGrad(0, g);
    t.Ready(0);
    return t.Step(2);
  }));
  for (auto& t : trainers) {
    EXPECT_EQ(t->page().header().verdict.flags, wire::kSkippedNonfinite);
    EXPECT_EQ(t->page().header().verdict.step, 2u);
  }
  EXPECT_EQ(Master(*trainers[0], 0), weight);
  EXPECT_EQ(*trainers[0]->Read("layers.0.w", StateKind::kMomentum), momentum);
  ExpectAllOk(StepAll(trainers, 3));
  EXPECT_NE(Master(*trainers[0], 0), weight);
}

// 1e38 is finite, and 20 of them are not: momentum 0.95 sums as many.
TEST_F(StepTest, AFiniteGradientThatMomentumCannotHoldSkipsTheStep) {
  Trainers trainers = Start("large", 1);
  ExpectAllOk(StepAll(trainers, 1));
  const std::vector<float> weight = Master(*trainers[0], 0);
  const auto step_with = [&](uint64_t step, float value, double max_norm) {
    trainers[0]->SetGrad(0, std::vector<float>(weight.size(), value));
    trainers[0]->Ready(0);
    EXPECT_TRUE(trainers[0]->Step(step, 1, 0, max_norm).ok());
    return trainers[0]->page().header().verdict.flags;
  };
  EXPECT_EQ(step_with(2, 1e37f, 0), wire::kSkippedNonfinite);
  EXPECT_EQ(Master(*trainers[0], 0), weight);
  // Clipping comes before momentum: what it leaves is small.
  EXPECT_EQ(step_with(3, 1e37f, 1), wire::kApplied | wire::kClipped);
  for (uint64_t step = 4; step < 80; ++step) {
    ASSERT_EQ(step_with(step, 1e35f, 0), uint32_t{wire::kApplied}) << step;
  }
  for (float w : Master(*trainers[0], 0)) ASSERT_TRUE(std::isfinite(w));
  const std::vector<float> momentum = *trainers[0]->Read("layers.0.w", StateKind::kMomentum);
  for (float m : momentum) ASSERT_TRUE(std::isfinite(m));
}

TEST_F(StepTest, FoundInfElsewhereSkipsToo) {
  Trainers trainers = Start("found", 2);
  const std::vector<float> weight = Master(*trainers[0], 0);
  ExpectAllOk(OnRanks(2, [&](int r) {
    SendGrads(*trainers[r], 1);
    return trainers[r]->Step(1, 1, r == 1 ? uint32_t{wire::kFoundInf} : 0u);
  }));
  EXPECT_EQ(Master(*trainers[0], 0), weight);
}

TEST_F(StepTest, ClipScalesTheMuonRouteByTheGlobalNorm) {
  Trainers trainers = Start("clip", 1);
  double norm = 0;
  for (int p : {0, 2, 3}) {
    for (float x : GradOf(p, 0, 1)) norm += double{x} * x;
  }
  norm = std::sqrt(norm);
  SendGrads(*trainers[0], 1);
  ASSERT_TRUE(trainers[0]->Step(1, 1, 0, /*max_norm=*/1.0).ok());
  const wire::Verdict& v = trainers[0]->page().header().verdict;
  EXPECT_NEAR(v.total_norm, norm, 1e-6 * norm);
  EXPECT_DOUBLE_EQ(v.clip_coefficient, 1.0 / (v.total_norm + 1e-6));
  const std::vector<float> momentum = *trainers[0]->Read("layers.0.w", StateKind::kMomentum);
  EXPECT_NEAR(momentum[0], GradOf(0, 0, 1)[0] * v.clip_coefficient, 1e-7);
}

TEST_F(StepTest, GroupsThatDifferAreNamedAndTheStepCanBeTriedAgain) {
  Trainers trainers = Start("groups", 2);
  testing::SetGroups(*trainers[1], 0.5);
  const std::vector<float> weight = Master(*trainers[0], 0);
  for (const absl::Status& status : StepAll(trainers, 1)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("group 'default/muon'"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank(s) 1"));
  }
  EXPECT_EQ(Master(*trainers[0], 0), weight);
  testing::SetGroups(*trainers[1]);
  ExpectAllOk(StepAll(trainers, 1));
}

TEST_F(StepTest, ADiscardOnAllRanksDropsTheGradientsAndOnOneIsNamed) {
  Trainers trainers = Start("discard", 2);
  Trainers plain = Start("plain", 2);
  ExpectAllOk(OnRanks(2, [&](int r) {
    SendGrads(*trainers[r], 77);
    trainers[r]->Discard();
    SendGrads(*trainers[r], 1);
    return trainers[r]->Step(1);
  }));
  ExpectAllOk(StepAll(plain, 1));
  EXPECT_EQ(Master(*trainers[0], 0), Master(*plain[0], 0));

  for (const absl::Status& status : OnRanks(2, [&](int r) {
         SendGrads(*trainers[r], 2);
         if (r == 1) trainers[r]->Discard();
         if (r == 1) SendGrads(*trainers[r], 2);
         return trainers[r]->Step(2);
       })) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank(s) 0: 3; rank(s) 1: 4"));
  }
  ExpectAllOk(StepAll(trainers, 2));
}

TEST_F(StepTest, RanksThatRanDifferentNumbersOfBackwardsAreNamed) {
  Trainers trainers = Start("passes", 2);
  for (const absl::Status& status : OnRanks(2, [&](int r) {
         SendGrads(*trainers[r], 1);
         return trainers[r]->Step(1, r == 0 ? 4 : 3);
       })) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank(s) 1: 3; rank(s) 0: 4"));
  }
}

TEST_F(StepTest, TheSameStepTwiceIsOneUpdateAndAFarOneIsRefused) {
  Trainers trainers = Start("repeat", 1);
  LocalTrainer& t = *trainers[0];
  ExpectAllOk(StepAll(trainers, 1));
  const std::vector<float> weight = Master(t, 0);
  EXPECT_TRUE(t.Step(1).ok());
  EXPECT_EQ(Master(t, 0), weight);
  const absl::Status far = t.Step(3);
  EXPECT_EQ(far.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(far.message()), HasSubstr("expected 2, got 3"));
  ExpectAllOk(StepAll(trainers, 2));
}

TEST_F(StepTest, ADeadRankEndsTheStepOfTheOthersAtOnceAndSparesOtherSessions) {
  Trainers trainers = Start("dying", 2);
  Trainers other = Start("other", 2);
  SendGrads(*trainers[0], 1);
  trainers[0]->PushStep(1);
  trainers[1]->Die();
  const absl::Status status = trainers[0]->AwaitVerdict();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  ExpectAllOk(StepAll(other, 1));
  trainers[0]->Die();
  EXPECT_EQ(table_->size(), 1);
}

TEST_F(StepTest, EveryWrongFieldOfARecordEndsThatSessionWithItsName) {
  Trainers other = Start("bystander", 2);
  using Mutation = std::pair<const char*, std::function<void(wire::Record&)>>;
  const Mutation mutations[] = {
      {"type", [](wire::Record& r) { r.type = static_cast<wire::RecordType>(99); }},
      {"type", [](wire::Record& r) { r.type = wire::RecordType::kUnspecified; }},
      {"boundary", [](wire::Record& r) { r.boundary = 3; }},
      {"boundary", [](wire::Record& r) { r.boundary = 0xffffffff; }},
      {"generation", [](wire::Record& r) { r.generation = 2; }},
      {"epoch", [](wire::Record& r) { r.epoch = 9; }},
      {"table digest", [](wire::Record& r) { r.table_digest ^= 1; }},
      {"micro", [](wire::Record& r) { r.micro = 1; }},
      {"step: expected 0", [](wire::Record& r) { r.step = 5; }},
      {"flags: expected 0", [](wire::Record& r) { r.flags = 0xff; }},
      {"max_norm: expected 0", [](wire::Record& r) { r.max_norm = 5; }},
      {"max_norm: expected 0", [](wire::Record& r) { r.max_norm = std::nan(""); }},
      {"ticket: expected 0", [](wire::Record& r) { r.ticket = 5; }},
      {"boundary: expected 0",
       [](wire::Record& r) { r.type = wire::RecordType::kStep, r.step = 1, r.boundary = 1; }},
      {"micro: expected 0",
       [](wire::Record& r) { r.type = wire::RecordType::kDiscard, r.micro = 1; }},
      {"windows", [](wire::Record& r) { r.type = wire::RecordType::kMaterialize; }},
      {"windows", [](wire::Record& r) { r.type = wire::RecordType::kRelease; }},
      {"PREPARE", [](wire::Record& r) { r.type = wire::RecordType::kPrepare; }}};
  int step = 0;
  for (const auto& [field, mutate] : mutations) {
    Trainers trainers = Start("broken", 1);
    wire::Record record = trainers[0]->NewRecord(wire::RecordType::kGradsReady);
    mutate(record);
    trainers[0]->Push(record);
    const absl::Status status = trainers[0]->Await([] { return false; });
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    trainers[0]->Die();
    ExpectAllOk(StepAll(other, ++step));
  }
}

TEST_F(StepTest, AnImpossibleRingTailEndsTheSession) {
  Trainers trainers = Start("tail", 1);
  trainers[0]->page().header().ring_tail.store(1u << 30);
  trainers[0]->page().RingDaemon();
  EXPECT_THAT(std::string(trainers[0]->Await([] { return false; }).message()), HasSubstr("ring"));
}

TEST_F(StepTest, ARankThatComesAfterAStepWasGivenUpIsToldTheReason) {
  Trainers trainers = Start("leaving", 3);
  ASSERT_TRUE(trainers[0]->Close().ok());
  for (int rank : {1, 2}) {
    SendGrads(*trainers[rank], 1);
    const absl::Status status = trainers[rank]->Step(1);
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 0 has closed its session"), Not(HasSubstr("timeout")),
                      Not(HasSubstr("did not come"))));
    EXPECT_EQ(rank == 2, absl::StrContains(status.message(), "was given up before this rank"));
  }
}

class StepTimeoutTest : public StepTest {
 protected:
  StepTimeoutTest()
      : StepTest(
            {.formation_timeout = absl::Seconds(20), .step_timeout = absl::Milliseconds(200)}) {}
};

TEST_F(StepTimeoutTest, ARankThatDoesNotComeIsNamedAndTheStepCanBeTriedAgain) {
  Trainers trainers = Start("late", 2);
  SendGrads(*trainers[0], 1);
  const absl::Status early = trainers[0]->Step(1);
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(early.message()), HasSubstr("rank(s) 1 did not come"));
  SendGrads(*trainers[1], 1);
  const absl::Status late = trainers[1]->Step(1);
  EXPECT_EQ(late.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(late.message()),
              AllOf(HasSubstr("step 1 was given up before this rank came"),
                    HasSubstr("rank(s) 1 did not come within 200ms")));
  EXPECT_EQ(trainers[0]->generation(), trainers[1]->generation());
  ExpectAllOk(StepAll(trainers, 1));
}

}  // namespace
}  // namespace dmuon::server
