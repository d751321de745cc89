// What a step reports of itself.
#include "tests/server/session/step_fixture.h"

namespace dmuon::server {
namespace {

using testing::ExpectAllOk;
using ::testing::HasSubstr;
using testing::LocalTrainer;
using testing::OnRanks;
using testing::StepTest;
using testing::Trainers;

TEST_F(StepTest, AReportIsOfTheStepThatWasAnsweredLastAlsoWhenAskedForAtOnce) {
  Trainers trainers = Start("report", 1);
  LocalTrainer& t = *trainers[0];
  for (uint64_t step = 1; step <= 200; ++step) {
    SendGrads(t, 1);
    t.PushStep(step);
    ASSERT_TRUE(t.AwaitVerdict().ok());
    const auto report = table_->StepResult(t.trainer(), t.opened().id, 0);
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->step, step);
    ASSERT_EQ(report->newton_schulz_calls, 5);
  }
}

TEST_F(StepTest, AReportTellsWhatEachBlockDid) {
  Trainers trainers = Start("blocks", 2);
  ExpectAllOk(OnRanks(2, [&](int r) {
    SendGrads(*trainers[r], 1);
    return trainers[r]->Step(1, 1, 0, /*max_norm=*/0.5);
  }));
  const auto report = table_->DescribeStep("blocks", 1);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->session, "blocks");
  ASSERT_EQ(report->blocks.size(), 5u);
  const std::pair<std::string, int> expected[] = {
      {"layers.0.w", 0}, {"layers.1.w", 0}, {"head", 0}, {"head", 1}, {"head", 2}};
  double square = 0;
  for (size_t i = 0; i < 5; ++i) {
    const BlockReport& block = report->blocks[i];
    EXPECT_EQ(std::pair(block.parameter, block.plan.index), expected[i]);
    EXPECT_EQ(block.plan.form, "direct");
    EXPECT_THAT(block.plan.kernel, HasSubstr("fp32"));
    ASSERT_TRUE(block.measures.ran);
    square += block.measures.norm * block.measures.norm;
    // match_rms_adamw aims at 0.2; singular values between 0.7 and 1.13 reach it nearly.
    EXPECT_NEAR(block.measures.update_rms, 0.2, 0.06);
    EXPECT_GT(block.measures.orthogonality_error, 0);
    EXPECT_LT(block.measures.orthogonality_error, 0.6);
  }
  EXPECT_EQ(report->blocks[3].plan.rows.row_begin, 6);
  EXPECT_EQ(report->blocks[3].plan.rows.row_end, 12);
  // U = (1 + mu) c G in the first step.
  const double expected_norm =
      (1 + testing::kMomentum) * report->clip_coefficient * report->total_norm;
  EXPECT_NEAR(std::sqrt(square), expected_norm, 1e-5 * expected_norm);
  // A trainer that did not ask for blocks gets none.
  const LocalTrainer& t = *trainers[0];
  EXPECT_TRUE(table_->StepResult(t.trainer(), t.opened().id, 1)->blocks.empty());
  EXPECT_EQ(table_->StepResult(t.trainer(), t.opened().id, 1, true)->blocks.size(), 5u);
}

// Steps 1 and 2; in the second one parameter has a gradient.
class PartialStepTest : public StepTest {
 protected:
  static void StepWithAllThenWithOne(LocalTrainer& t) {
    SendGrads(t, 1);
    ASSERT_TRUE(t.Step(1).ok());
    t.SetGrad(2, GradOf(2, 0, 2));
    t.Ready(1);
    ASSERT_TRUE(t.Step(2).ok());
  }
};

TEST_F(PartialStepTest, BlocksThatDidNotRunAreNotReported) {
  Trainers trainers = Start("idle", 1);
  LocalTrainer& t = *trainers[0];
  ASSERT_NO_FATAL_FAILURE(StepWithAllThenWithOne(t));
  const auto partial = table_->DescribeStep("idle", 2);
  ASSERT_EQ(partial->blocks.size(), 1u);
  EXPECT_EQ(partial->blocks[0].parameter, "layers.1.w");
  SendGrads(t, 3);
  ASSERT_TRUE(t.Step(3, 1, wire::kFoundInf).ok());
  EXPECT_TRUE(table_->DescribeStep("idle", 3)->blocks.empty());
  EXPECT_EQ(table_->DescribeStep("idle", 1)->blocks.size(), 5u);
}

TEST_F(PartialStepTest, AStepNamesTheFormsThatRanInItAndNoneWhereNothingDid) {
  Trainers trainers = Start("forms", 1);
  LocalTrainer& t = *trainers[0];
  ASSERT_NO_FATAL_FAILURE(StepWithAllThenWithOne(t));
  ASSERT_TRUE(t.Step(3).ok());  // none has
  SendGrads(t, 4);
  ASSERT_TRUE(t.Step(4, 1, wire::kFoundInf).ok());
  ASSERT_TRUE(table_->DescribeStep("forms", 4).ok());  // waits until it is written down
  const auto steps = table_->Steps("forms", 0, absl::ZeroDuration());
  ASSERT_TRUE(steps.ok()) << steps.status();
  ASSERT_EQ(steps->size(), 4u);
  const char* const expected[] = {"gram 0, direct 5", "gram 0, direct 1", "", ""};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ((*steps)[i].forms, expected[i]) << "step " << i + 1;
    EXPECT_EQ((*steps)[i].kernel.empty(), i >= 2) << "step " << i + 1;
  }
}

TEST_F(StepTest, AStepThatIsNotRememberedIsRefusedWithThoseThatAre) {
  Trainers trainers = Start("remembered", 1);
  LocalTrainer& t = *trainers[0];
  const auto words = [&](uint64_t step) {
    return std::string(table_->DescribeStep("remembered", step).status().message());
  };
  EXPECT_THAT(words(7), HasSubstr("step 7 is not remembered, nor is any other"));
  for (uint64_t step = 1; step <= 3; ++step) {
    SendGrads(t, static_cast<int>(step));
    ASSERT_TRUE(t.Step(step).ok());
  }
  EXPECT_TRUE(table_->DescribeStep("remembered", 3).ok());
  EXPECT_THAT(words(7), HasSubstr("step 7 is not remembered, only 1 to 3"));
}

}  // namespace
}  // namespace dmuon::server
