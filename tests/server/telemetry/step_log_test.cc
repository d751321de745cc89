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
  StepLog log(2, 8);
  LoggedStep found;
  log.Add(Part(1, 0.5, 3));
  EXPECT_FALSE(log.Find(1, &found));
  log.Add(Part(1, 0.75, 4));
  ASSERT_TRUE(log.Find(0, &found));
  EXPECT_EQ(found.merged.update, 0.75);
  EXPECT_EQ(found.merged.newton_schulz_calls, 7);
}

TEST(StepLog, TheOldestAreForgotten) {
  StepLog log(1, 4);
  for (uint64_t k = 1; k <= 10; ++k) log.Add(Part(k));
  const std::vector<LoggedStep> all = log.After(0, absl::ZeroDuration());
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all.front().merged.step, 7u);
  LoggedStep found;
  EXPECT_FALSE(log.Find(3, &found));
}

TEST(StepLog, AWaiterWakesForTheNextStepAndForTheEnd) {
  StepLog log(1, 4);
  std::thread adds([&] { log.Add(Part(1)); });
  EXPECT_EQ(log.After(0, absl::Seconds(20)).size(), 1u);
  adds.join();
  std::thread closes([&] { log.Close(); });
  EXPECT_TRUE(log.After(1, absl::Seconds(20)).empty());
  closes.join();
  EXPECT_TRUE(log.closed());
}

TEST(StepLog, AFailedStepIsReadableAtOnceAndItsRetryIsAnother) {
  StepLog log(2, 8);
  SlotStep failed = Part(1);
  failed.status = absl::AbortedError("a rank died");
  log.Add(failed);
  EXPECT_EQ(log.After(0, absl::ZeroDuration()).size(), 1u);
  log.Add(Part(1));
  log.Add(Part(1));
  EXPECT_EQ(log.After(0, absl::ZeroDuration()).size(), 2u);
}

}  // namespace
}  // namespace dmuon::server
