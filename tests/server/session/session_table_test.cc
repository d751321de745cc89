// Formation, identity, state and the end of sessions.

#include "server/session/session_table.h"

#include "kernels/newton_schulz/cost_table.h"
#include "tests/server/session/fixture.h"

namespace dmuon::server {
namespace {

using testing::ExpectAllOk;
using ::testing::HasSubstr;
using testing::LocalTrainer;
using testing::OnRanks;
using testing::SmallOptimizer;
using testing::SmallSpec;

class SessionTableTest : public testing::SessionTest {};

TEST_F(SessionTableTest, ASessionIsReadyWhenAllRanksCameAndGoneWhenAllLeft) {
  auto trainers = Start("life", 2);
  const SessionDescription d = *table_->Describe("life");
  EXPECT_EQ(d.state, SessionState::kReady);
  EXPECT_EQ(d.attachments.size(), 2u);
  EXPECT_EQ(d.memory.size(), 2u);
  ExpectAllOk(OnRanks(2, [&](int r) { return trainers[r]->Close(); }));
  EXPECT_EQ(table_->size(), 0);
  EXPECT_EQ(table_->Describe("life").status().code(), absl::StatusCode::kNotFound);
}

// A table that makes gram cheap on every shape, in the default dtype and in fp32.
std::shared_ptr<const kernels::CostTable> WhereGramIsCheap() {
  return std::make_shared<const kernels::CostTable>(
      kernels::CostTable{{{{std::nullopt, Dtype::kF32}, {64}, {1}, {{1e8, 1e12}}}}, 1e10});
}

TEST_F(SessionTableTest, ASessionIsPlacedAndItsFormsAreChosenByWhatWasMeasured) {
  for (const bool measured : {false, true}) {
    SessionTable table(*backend_, {}, measured ? WhereGramIsCheap() : nullptr);
    LocalTrainer trainer(table, 1, 0);
    ASSERT_TRUE(trainer.Open(SmallSpec("costs", 1)).ok());
    EXPECT_EQ(table.Describe("costs")->placement.measured, measured);
    OptimizerSpec optimizer = SmallOptimizer();
    optimizer.newton_schulz.form = kernels::NsForm::kGram;
    ASSERT_TRUE(trainer.Configure(optimizer).ok());
    ASSERT_TRUE(trainer.Register().ok());
    SetGroups(trainer);
    for (int p = 0; p < 4; ++p) {
      trainer.SetGrad(p, std::vector<float>(testing::SmallTable().parameters[p].numel(), 1));
    }
    for (uint32_t b = 0; b < 3; ++b) trainer.Ready(b);
    ASSERT_TRUE(trainer.Step(1, 1).ok());
    const auto steps = table.Steps("costs", 0, absl::Seconds(20));
    ASSERT_TRUE(steps.ok() && !steps->empty());
    // By shape alone 12 x 20 and 20 x 8 are wide enough, the three 6 x 9 are not.
    EXPECT_THAT(steps->front().forms, HasSubstr(measured ? "direct 0" : "direct 3"));
  }
}

TEST_F(SessionTableTest, CostsAreThoseOfTheOptionsOnceTheyAreKnown) {
  LocalTrainer trainer(*table_, 1, 0);
  ASSERT_TRUE(trainer.Open(SmallSpec("options", 1)).ok());
  const Placement before = table_->Describe("options")->placement;
  OptimizerSpec optimizer = SmallOptimizer();
  optimizer.newton_schulz.steps = 10;
  ASSERT_TRUE(trainer.Configure(optimizer).ok());
  const Placement after = table_->Describe("options")->placement;
  EXPECT_EQ(after.owner, before.owner);
  EXPECT_GT(after.cost[0], 1.5 * before.cost[0]);
  EXPECT_EQ(after.cost[1], before.cost[1]) << "adamw has no Newton-Schulz";
  EXPECT_DOUBLE_EQ(after.load[0], after.cost[0] + after.cost[1] + after.cost[2] + after.cost[3]);
}

TEST_F(SessionTableTest, TablesThatDifferNameTheFirstParameterAndTheRank) {
  LocalTrainer first(*table_, 1, 0), second(*table_, 2, 1);
  const auto status = OnRanks(2, [&](int r) {
    OpenSpec spec = SmallSpec("differ", 2);
    if (r == 1) spec.table.parameters[2].shape = {20, 9};
    return (r == 0 ? first : second).Open(spec);
  });
  for (const absl::Status& s : status) {
    EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(s.message()), HasSubstr("parameter 2: 'layers.1.w'"));
  }
  EXPECT_EQ(table_->size(), 0);
}

TEST_F(SessionTableTest, ModesAndMeshesThatDifferAreNamedWithBothValues) {
  const std::pair<OpenSpec, const char*> others[] = {
      {SmallSpec("modes", 2, /*z3=*/true), "reshard_after_forward: expected "},
      {SmallSpec("modes", 3), "mesh: expected 1 x "}};
  uint64_t attachment = 1;
  for (const auto& mismatch : others) {
    const OpenSpec& other = mismatch.first;
    LocalTrainer first(*table_, attachment++, 0), second(*table_, attachment++, 1);
    const auto status = OnRanks(
        2, [&](int r) { return r == 0 ? first.Open(SmallSpec("modes", 2)) : second.Open(other); });
    for (const absl::Status& s : status) {
      EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(s.message()), HasSubstr(mismatch.second));
    }
  }
}

TEST_F(SessionTableTest, OptimizersThatDifferAreNamed) {
  LocalTrainer first(*table_, 1, 0), second(*table_, 2, 1);
  const auto status = OnRanks(2, [&](int r) {
    LocalTrainer& t = r == 0 ? first : second;
    RETURN_IF_ERROR(t.Open(SmallSpec("optimizers", 2)));
    OptimizerSpec spec = SmallOptimizer();
    if (r == 1) spec.nesterov = false;
    return t.Configure(spec);
  });
  for (const absl::Status& s : status) EXPECT_THAT(std::string(s.message()), HasSubstr("nesterov"));
}

TEST_F(SessionTableTest, AnotherUsersNameIsDenied) {
  auto trainers = Start("mine", 1);
  OpenSpec spec = SmallSpec("mine", 1);
  const absl::Status status = table_->Open({AttachmentId(99), 2000, 99}, spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(table_
                ->ReadState({AttachmentId(99), 2000, 99}, trainers[0]->opened().id, "head",
                            StateKind::kWeight)
                .status()
                .code(),
            absl::StatusCode::kPermissionDenied);
}

TEST_F(SessionTableTest, ASecondProcessForTheSameRankIsTurnedAwayAndHarmsNobody) {
  auto trainers = Start("twice", 2);
  LocalTrainer intruder(*table_, 50, 1);
  EXPECT_EQ(intruder.Open(SmallSpec("twice", 2)).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(table_->Describe("twice")->state, SessionState::kReady);
}

TEST_F(SessionTableTest, AnotherJobOfTheSameNameAndUserIsTurnedAwayAndHarmsNobody) {
  auto trainers = Start("taken", 2);
  OpenSpec other = SmallSpec("taken", 2);
  other.table.parameters[0].shape = {12, 21};
  LocalTrainer stranger(*table_, 60, 0), wider(*table_, 61, 2);
  EXPECT_EQ(stranger.Open(other).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(wider.Open(SmallSpec("taken", 3)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table_->Describe("taken")->state, SessionState::kReady);
  ExpectAllOk(OnRanks(2, [&](int r) { return trainers[r]->Step(1); }));
}

TEST_F(SessionTableTest, ARankOfAnotherAttachmentCannotBeSpokenFor) {
  auto trainers = Start("foreign", 2);
  const Trainer& zero = trainers[0]->trainer();
  const SessionId id = trainers[0]->opened().id;
  EXPECT_EQ(table_->Arena(zero, id, 1, wire::ArenaKind::kGrad).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table_->Arena(zero, id, 7, wire::ArenaKind::kGrad).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table_->Close(zero, id, 1).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SessionTableTest, ALyingSizeOrOffsetIsRefusedWithTheNumbers) {
  LocalTrainer t(*table_, 1, 0);
  ASSERT_TRUE(t.Open(SmallSpec("lying", 1)).ok());
  ASSERT_TRUE(t.Configure(SmallOptimizer()).ok());
  const Layout& l = t.configured().layout;
  const auto reg = [&](uint64_t offset, uint64_t size) {
    return table_
        ->Register(t.trainer(), t.opened().id, 0,
                   {.buffers = {{wire::ArenaKind::kControl, 0, l.control_bytes},
                                {wire::ArenaKind::kGrad, offset, size},
                                {wire::ArenaKind::kWeight, 0, l.weight_bytes}}})
        .status();
  };
  EXPECT_THAT(std::string(reg(0, l.grad_bytes + 1).message()),
              HasSubstr("buffer 'grad': expected offset 0"));
  EXPECT_EQ(reg(256, l.grad_bytes).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(reg(0, UINT64_MAX).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(reg(0, l.grad_bytes).ok());
}

TEST_F(SessionTableTest, ADeviceIsRefusedWhereTheDaemonComputesInTheHostsMemory) {
  LocalTrainer t(*table_, 1, 0);
  ASSERT_TRUE(t.Open(SmallSpec("device", 1)).ok());
  EXPECT_FALSE(t.opened().arenas_by_handle);
  OptimizerSpec spec = SmallOptimizer();
  spec.device = "GPU-1";
  const absl::Status refused = t.Configure(spec);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("given device 'GPU-1'"));
  ASSERT_TRUE(t.Configure(SmallOptimizer()).ok());
  const absl::Status early = table_->Confirm(t.trainer(), t.opened().id, 0, {}).status();
  EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(early.message()), HasSubstr("expected RegisterBuffers"));
}

TEST_F(SessionTableTest, AMemoryLimitIsRefusedWithTheBytes) {
  SessionTable small(*backend_, {.max_session_bytes = 10000});
  LocalTrainer t(small, 1, 0);
  ASSERT_TRUE(t.Open(SmallSpec("big", 1)).ok());
  const absl::Status status = t.Configure(SmallOptimizer());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_session_bytes is 10000"));
}

TEST_F(SessionTableTest, ATrainerThatDiesWhileTheSessionFormsEndsItForTheOthers) {
  LocalTrainer first(*table_, 1001, 0);
  std::thread dies([&] {
    while (table_->size() == 0) std::this_thread::yield();
    while (table_->Describe("forming")->attachments.empty()) std::this_thread::yield();
    first.Die();
  });
  const absl::Status status = first.Open(SmallSpec("forming", 2));
  dies.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(table_->size(), 0);
  auto next = Start("forming", 2);  // the name is free
  EXPECT_EQ(table_->Describe("forming")->state, SessionState::kReady);
}

TEST_F(SessionTableTest, AJobAfterAKilledJobWorks) {
  auto trainers = Start("again", 2);
  trainers[0]->Die();
  auto next = Start("again", 2);
  EXPECT_EQ(table_->Describe("again")->state, SessionState::kReady);
  trainers[1]->Die();
  EXPECT_EQ(table_->size(), 1);
}

TEST_F(SessionTableTest, DrainRefusesNewSessionsAndEndsTheOthers) {
  auto trainers = Start("draining", 1);
  table_->StartDrain();
  LocalTrainer late(*table_, 77, 0);
  EXPECT_EQ(late.Open(SmallSpec("late", 1)).code(), absl::StatusCode::kUnavailable);
  table_->FinishDrain(absl::Now() + absl::Seconds(5));
  EXPECT_THAT(std::string(trainers[0]->Await([] { return false; }).message()),
              HasSubstr("drained"));
}

class FormationTimeoutTest : public testing::SessionTest {
 protected:
  FormationTimeoutTest() : SessionTest({.formation_timeout = absl::Milliseconds(100)}) {}
};

TEST_F(FormationTimeoutTest, RanksThatNeverComeAreNamed) {
  LocalTrainer first(*table_, 1, 0), second(*table_, 2, 2);
  const auto status =
      OnRanks(2, [&](int r) { return (r == 0 ? first : second).Open(SmallSpec("alone", 4)); });
  for (const absl::Status& s : status) {
    EXPECT_EQ(s.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(s.message()), HasSubstr("rank(s) 1, 3 did not come"));
  }
  EXPECT_EQ(table_->size(), 0);
}

}  // namespace
}  // namespace dmuon::server
