#include "client/ctl/views.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_split.h"

namespace dmuon::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::DescribeSessionResponse Session() {
  v1::DescribeSessionResponse session;
  session.mutable_summary()->set_name("run-7");
  session.mutable_summary()->set_state(v1::SESSION_STATE_READY);
  session.mutable_summary()->set_world_size(2);
  session.mutable_summary()->set_imbalance(1.25);
  session.mutable_mesh()->set_shard(2);
  session.add_loads(5e9);
  session.add_loads(3e9);
  session.set_lower_bound(4e9);
  v1::Placement* p = session.add_placement();
  p->set_name("layers.0.weight");
  p->set_owner(1);
  p->set_route(v1::ROUTE_SHARDED_ADAMW);
  p->add_shape(512);
  p->add_shape(256);
  p->set_bytes(512 * 256 * 4);
  p->set_cost(4.2e9);
  p->set_boundary("layers.0");
  v1::SlotMemory* memory = session.add_memory();
  memory->set_grad_bytes(2048);
  memory->set_control_bytes(4096);
  memory->set_page_locked_bytes(3 << 20);
  memory->set_planning_bytes(7 << 20);
  v1::AttachmentInfo* attachment = session.add_attachments();
  attachment->set_rank(0);
  attachment->set_pid(4321);
  attachment->set_alive(true);
  return session;
}

TEST(Views, ASessionShowsOwnersRoutesShapesLoadsAndMemory) {
  const View view = SessionView(Session());
  const std::string table = Render(view.tree, Format::kTable, view.sections);
  EXPECT_THAT(table, HasSubstr("imbalance (max / mean load):  1.250"));
  EXPECT_THAT(table, HasSubstr("5.00 GFLOP"));
  EXPECT_THAT(table, HasSubstr("sharded_adamw"));
  EXPECT_THAT(table, HasSubstr("512 x 256"));
  EXPECT_THAT(table, HasSubstr("512 KiB"));
  for (const char* kind : {"2.00 KiB", "4.00 KiB", "3.00 MiB", "7.00 MiB"})
    EXPECT_THAT(table, HasSubstr(kind));
  EXPECT_THAT(table, HasSubstr("4321"));
}

TEST(Views, ASessionSaysWhetherItsCostsAreSecondsOrFlops) {
  v1::DescribeSessionResponse session = Session();
  EXPECT_THAT(Render(SessionView(session).tree, Format::kTable, SessionView(session).sections),
              HasSubstr("flops"));
  session.set_costs_measured(true);
  session.set_loads(0, 0.0125);
  const View view = SessionView(session);
  const std::string table = Render(view.tree, Format::kTable, view.sections);
  EXPECT_THAT(table, HasSubstr("measured"));
  EXPECT_THAT(table, HasSubstr("12.5 ms"));
  EXPECT_THAT(table, Not(HasSubstr("FLOP")));
}

TEST(Views, JsonAndYamlCarryTheFiguresAsTheyAre) {
  const View view = SessionView(Session());
  const Tree parsed = Tree::parse(Render(view.tree, Format::kJson, view.sections));
  EXPECT_EQ(parsed, view.tree);
  EXPECT_EQ(parsed["placement"][0]["bytes"], 512 * 256 * 4);
  EXPECT_EQ(parsed["placement"][0]["route"], "sharded_adamw");
  EXPECT_EQ(parsed["slots"][0]["alive"], true);
  EXPECT_THAT(Render(view.tree, Format::kYaml, view.sections),
              HasSubstr("    shape: [512, 256]\n"));
}

TEST(Views, RowsAreAlignedAndHaveNoTrailingSpaces) {
  v1::ListSessionsResponse sessions;
  for (const char* name : {"a", "a-longer-name"}) {
    v1::SessionSummary* s = sessions.add_sessions();
    s->set_name(name);
    s->set_state(v1::SESSION_STATE_FORMING);
  }
  const View view = SessionsView(sessions);
  std::vector<std::string> lines =
      absl::StrSplit(Render(view.tree, Format::kTable, view.sections), '\n');
  ASSERT_EQ(lines.size(), 4u);
  const size_t at = lines[0].find("STATE");
  EXPECT_EQ(lines[1].find("forming"), at);
  EXPECT_EQ(lines[2].find("forming"), at);
  for (const std::string& line : lines) EXPECT_THAT(line, Not(::testing::EndsWith(" ")));
}

TEST(Views, NoSessionsIsAnEmptyListAndNotNothing) {
  const View view = SessionsView({});
  EXPECT_EQ(Render(view.tree, Format::kJson, view.sections), "{\n  \"sessions\": []\n}\n");
  EXPECT_THAT(Render(view.tree, Format::kTable, view.sections), ::testing::StartsWith("NAME"));
}

TEST(Views, AStepInJsonIsOneLineAndItsInfinityIsAWord) {
  v1::StepRecord record;
  record.set_step(3);
  record.set_outcome(v1::STEP_OUTCOME_SKIPPED_NONFINITE);
  record.set_total_norm(std::numeric_limits<double>::infinity());
  const std::string json = RenderRow(StepTree(record), Format::kJson, StepColumns());
  EXPECT_EQ(json.find('\n'), json.size() - 1);
  const Tree parsed = Tree::parse(json);
  EXPECT_EQ(parsed["outcome"], "skipped_nonfinite");
  EXPECT_EQ(parsed["total_norm"], "inf");
  EXPECT_THAT(RenderRow(StepTree(record), Format::kTable, StepColumns()),
              ::testing::AllOf(HasSubstr("skipped_nonfinite"), HasSubstr("  inf  ")));
}

TEST(Views, AStepInWhichNothingRanNamesNoForm) {
  v1::StepRecord record;
  EXPECT_FALSE(StepTree(record).contains("forms"));
  EXPECT_FALSE(StepTree(record).contains("kernel"));
  record.set_forms("gram 1, direct 2");
  EXPECT_EQ(StepTree(record)["forms"], "gram 1, direct 2");
}

TEST(Views, BlocksThatAreNotFiniteAreShownAsSuch) {
  v1::StepRecord record;
  v1::BlockRecord* block = record.add_blocks();
  block->set_norm(std::numeric_limits<double>::quiet_NaN());
  block->set_update_rms(std::numeric_limits<double>::infinity());
  block->set_orthogonality_error(-std::numeric_limits<double>::infinity());
  const View view = StepView(record);
  const Tree parsed = Tree::parse(Render(view.tree, Format::kJson, view.sections));
  EXPECT_EQ(parsed["blocks"][0]["norm"], "nan");
  EXPECT_EQ(parsed["blocks"][0]["update_rms"], "inf");
  EXPECT_EQ(parsed["blocks"][0]["orthogonality_error"], "-inf");
  const std::string table = Render(view.tree, Format::kTable, view.sections);
  EXPECT_THAT(table, ::testing::ContainsRegex(" nan +inf +-inf"));
  EXPECT_THAT(Render(view.tree, Format::kYaml, view.sections),
              ::testing::AllOf(HasSubstr("norm: \"nan\""), HasSubstr("update_rms: \"inf\""),
                               HasSubstr("orthogonality_error: \"-inf\"")));
}

TEST(Views, AStepShowsItsBlocksAndLeavesOutWhatWasNotMeasured) {
  v1::StepRecord record;
  record.set_session("run-7");
  record.set_step(12);
  for (int i = 0; i < 2; ++i) {
    v1::BlockRecord* block = record.add_blocks();
    block->set_parameter("h.0.attn");
    block->set_index(i);
    block->mutable_rows()->set_row_begin(64 * i);
    block->mutable_rows()->set_row_end(64 * (i + 1));
    block->set_form("gram");
    block->set_kernel("gram fp32 (avx2)");
  }
  record.mutable_blocks(1)->set_update_rms(0.203);
  record.mutable_blocks(1)->set_orthogonality_error(std::numeric_limits<double>::quiet_NaN());
  const View view = StepView(record);
  EXPECT_EQ(view.tree["session"], "run-7");
  EXPECT_EQ(view.tree["step"], 12);
  const Tree& blocks = view.tree["blocks"];
  ASSERT_EQ(blocks.size(), 2u);
  EXPECT_FALSE(blocks[0].contains("update_rms"));
  EXPECT_EQ(blocks[1]["row_begin"], 64);
  EXPECT_EQ(blocks[1]["update_rms"], 0.203);
  EXPECT_EQ(blocks[1]["orthogonality_error"], "nan");  // measured, and not a number
  const std::string table = Render(view.tree, Format::kTable, view.sections);
  EXPECT_THAT(table, HasSubstr("UPDATE RMS"));
  EXPECT_THAT(table, HasSubstr("0.203"));
  EXPECT_EQ(Tree::parse(Render(view.tree, Format::kJson, view.sections)), view.tree);
}

TEST(Views, ControlCharactersOfATrainersNameDoNotReachTheTerminal) {
  v1::ListSessionsResponse sessions;
  sessions.add_sessions()->set_name("evil\x1b[2J\nname");
  const View view = SessionsView(sessions);
  EXPECT_THAT(Render(view.tree, Format::kTable, view.sections), HasSubstr("evil?[2J?name"));
}

}  // namespace
}  // namespace dmuon::ctl
