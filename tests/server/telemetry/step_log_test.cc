#include "server/telemetry/step_log.h"

#include <thread>

#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

SlotStep Part(uint64_t step, double update = 0, int calls = 0) {
  SlotStep s;
  s.step = step;
  s.update = update;
  s.newton_schulz_calls = calls;
  return s;
}

TEST(StepLog, AStepIsReadableOnceAllSlotsHaveAddedTheirPart) {
  StepLog log({0, 0}, 8);
  LoggedStep found;
  log.Add(Part(1, 0.5, 3), SlotId(0), {});
  EXPECT_FALSE(log.Find(1, &found));
  log.Add(Part(1, 0.75, 4), SlotId(1), {});
  ASSERT_TRUE(log.Find(0, &found));
  EXPECT_EQ(found.merged.update, 0.75);
  EXPECT_EQ(found.merged.newton_schulz_calls, 7);
}

TEST(StepLog, TheOldestAreForgotten) {
  StepLog log({0}, 4);
  for (uint64_t k = 1; k <= 10; ++k) log.Add(Part(k), SlotId(0), {});
  const std::vector<LoggedStep> all = log.After(0, absl::ZeroDuration());
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all.front().merged.step, 7u);
  LoggedStep found;
  EXPECT_FALSE(log.Find(3, &found));
}

TEST(StepLog, AWaiterWakesForTheNextStepAndForTheEnd) {
  StepLog log({0}, 4);
  std::thread adds([&] { log.Add(Part(1), SlotId(0), {}); });
  EXPECT_EQ(log.After(0, absl::Seconds(20)).size(), 1u);
  adds.join();
  std::thread closes([&] { log.Close(); });
  EXPECT_TRUE(log.After(1, absl::Seconds(20)).empty());
  closes.join();
  EXPECT_TRUE(log.closed());
}

TEST(StepLog, AFailedStepIsReadableAtOnceAndItsRetryIsAnother) {
  StepLog log({0, 0}, 8);
  SlotStep failed = Part(1);
  failed.status = absl::AbortedError("a rank died");
  log.Add(failed, SlotId(0), {});
  EXPECT_EQ(log.After(0, absl::ZeroDuration()).size(), 1u);
  log.Add(Part(1), SlotId(0), {});
  log.Add(Part(1), SlotId(0), {});
  EXPECT_EQ(log.After(0, absl::ZeroDuration()).size(), 2u);
}

BlockMeasures Measured(float norm) { return {.ran = true, .norm = norm}; }

TEST(StepLog, BlocksOfAllSlotsStandInTheOrderOfTheSlots) {
  StepLog log({2, 1}, 8);
  log.Add(Part(1), SlotId(1), {Measured(3)});
  log.Add(Part(1), SlotId(0), {Measured(1), Measured(2)});
  LoggedStep found;
  std::vector<BlockMeasures> blocks;
  ASSERT_TRUE(log.Find(1, &found, &blocks));
  ASSERT_EQ(blocks.size(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(blocks[i].norm, i + 1);
}

TEST(StepLog, AStepDoesNotInheritTheBlocksOfTheOneWhosePlaceItTakes) {
  StepLog log({1}, 2);
  for (uint64_t k = 1; k <= 2; ++k) log.Add(Part(k), SlotId(0), {Measured(1)});
  SlotStep failed = Part(3);
  failed.status = absl::AbortedError("a rank died");
  log.Add(failed, SlotId(0), {});
  LoggedStep found;
  std::vector<BlockMeasures> blocks;
  ASSERT_TRUE(log.Find(3, &found, &blocks));
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_FALSE(blocks[0].ran);
}

TEST(StepLog, ManyBlocksAreRememberedOfTheNewestStepsOnly) {
  constexpr size_t kBlocks =
      StepLog::kBlockBytes / sizeof(BlockMeasures) / 3;  // three steps of them
  StepLog log({kBlocks}, 8);
  for (uint64_t k = 1; k <= 5; ++k) {
    log.Add(Part(k), SlotId(0), std::vector<BlockMeasures>(kBlocks, Measured(k)));
  }
  LoggedStep found;
  for (uint64_t k = 1; k <= 5; ++k) {
    std::vector<BlockMeasures> blocks;
    ASSERT_TRUE(log.Find(k, &found, &blocks));
    ASSERT_EQ(blocks.size(), k < 3 ? 0 : kBlocks) << k;
    if (k >= 3) {
      EXPECT_EQ(blocks.back().norm, k);
    }
  }
}

}  // namespace
}  // namespace dmuon::server
