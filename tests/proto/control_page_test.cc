#include "proto/wire/control_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <thread>

#include "absl/time/clock.h"

namespace dmuon::wire {
namespace {

using ::testing::HasSubstr;

struct Freed {
  void operator()(std::byte* p) const { std::free(p); }
};

// A page in plain memory: what both sides see, without the memfd.
class ControlPageTest : public ::testing::Test {
 protected:
  explicit ControlPageTest(PageLayout layout = PageLayout::For(3, 130, 2))
      : layout_(layout), memory_(static_cast<std::byte*>(std::aligned_alloc(4096, layout.bytes))) {
    std::fill_n(memory_.get(), layout.bytes, std::byte{0});
    page_ = ControlPage::Create(memory_.get(), layout, 0x1234);
  }
  absl::Status AttachStatus(size_t bytes) const {
    return ControlPage::Attach(memory_.get(), bytes).status();
  }

  PageLayout layout_;
  std::unique_ptr<std::byte, Freed> memory_;
  ControlPage page_;
};

TEST(PageLayout, PartsFollowEachOtherWithoutOverlap) {
  const PageLayout l = PageLayout::For(1000, 5000, 64);
  EXPECT_GE(l.ring, sizeof(PageHeader));
  EXPECT_GE(l.words, l.ring + sizeof(Record) * l.ring_capacity);
  EXPECT_GE(l.hyper, l.words + sizeof(BoundaryWords) * 1000);
  EXPECT_GE(l.presence, l.hyper + sizeof(GroupHyper) * 64);
  EXPECT_GE(l.norms, l.presence + 8 * ((5000 + 63) / 64));
  EXPECT_GE(l.bytes, l.norms + 8 * 5000);
  EXPECT_EQ(l.bytes % 4096, 0u);
}

TEST(PageLayout, TheRingHoldsFourRecordsForEachBoundary) {
  for (uint32_t boundaries : {1u, 16u, 17u, 100u, 65536u}) {
    const PageLayout l = PageLayout::For(boundaries, 1, 1);
    EXPECT_GE(l.ring_capacity, 4 * boundaries);
    EXPECT_EQ(l.ring_capacity & (l.ring_capacity - 1), 0u) << boundaries;
  }
}

TEST_F(ControlPageTest, AttachFindsTheCountsThatWereCreated) {
  const absl::StatusOr<ControlPage> attached = ControlPage::Attach(memory_.get(), layout_.bytes);
  ASSERT_TRUE(attached.ok()) << attached.status();
  EXPECT_EQ(attached->layout().boundaries, 3u);
  EXPECT_EQ(attached->layout().parameters, 130u);
  EXPECT_EQ(attached->groups().size(), 2u);
  EXPECT_EQ(attached->header().table_digest, 0x1234u);
}

TEST_F(ControlPageTest, AttachRefusesAnotherSize) {
  EXPECT_EQ(AttachStatus(layout_.bytes - 4096).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AttachStatus(layout_.bytes + 4096).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(AttachStatus(16).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ControlPageTest, AttachRefusesAnotherRelease) {
  page_.header().version = kControlPageVersion + 1;
  const absl::Status status = AttachStatus(layout_.bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("different releases"));
}

TEST_F(ControlPageTest, AttachRefusesCountsOutOfRange) {
  page_.header().parameters = kMaxParameters + 1;
  EXPECT_EQ(AttachStatus(layout_.bytes).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ControlPageTest, RecordsComeOutInTheOrderInWhichTheyWentIn) {
  for (uint32_t b = 0; b < 3; ++b) {
    ASSERT_TRUE(page_.Push({.type = RecordType::kGradsReady, .boundary = b, .generation = 7}));
  }
  for (uint32_t b = 0; b < 3; ++b) {
    const absl::StatusOr<std::optional<Record>> record = page_.Pop();
    ASSERT_TRUE(record.ok() && record->has_value());
    EXPECT_EQ((*record)->boundary, b);
    EXPECT_EQ((*record)->generation, 7u);
  }
  EXPECT_EQ(*page_.Pop(), std::nullopt);
}

TEST_F(ControlPageTest, AFullRingRefusesUntilOneIsRead) {
  const Record record{.type = RecordType::kStep};
  for (uint32_t i = 0; i < layout_.ring_capacity; ++i) ASSERT_TRUE(page_.Push(record));
  EXPECT_FALSE(page_.Push(record));
  ASSERT_TRUE(page_.Pop()->has_value());
  EXPECT_TRUE(page_.Push(record));
  EXPECT_FALSE(page_.Push(record));
}

TEST_F(ControlPageTest, TheRingWrapsWithoutLosingARecord) {
  for (uint64_t i = 0; i < 5ull * layout_.ring_capacity; ++i) {
    ASSERT_TRUE(page_.Push({.type = RecordType::kStep, .step = i}));
    ASSERT_EQ((**page_.Pop()).step, i);
  }
}

TEST_F(ControlPageTest, ATailThatCannotBeIsDataLoss) {
  for (uint64_t tail : {uint64_t{layout_.ring_capacity} + 1, ~uint64_t{0}}) {
    page_.header().ring_tail = tail;
    EXPECT_EQ(page_.Pop().status().code(), absl::StatusCode::kDataLoss) << tail;
  }
}

TEST_F(ControlPageTest, PresenceIsABitForEachParameter) {
  page_.SetPresent(0);
  page_.SetPresent(63);
  page_.SetPresent(129);
  EXPECT_EQ(page_.PresenceWord(0), uint64_t{1} | uint64_t{1} << 63);
  EXPECT_EQ(page_.PresenceWord(1), 0u);
  EXPECT_EQ(page_.PresenceWord(2), uint64_t{1} << 1);
  page_.ClearPresence();
  EXPECT_EQ(page_.PresenceWord(0) | page_.PresenceWord(1) | page_.PresenceWord(2), 0u);
}

TEST(ConsumedMark, RisesWithTheMicroAndStartsAboveEveryMicroOfTheGenerationBefore) {
  EXPECT_LT(ConsumedMark(1, 0), ConsumedMark(1, 1));
  EXPECT_LT(ConsumedMark(1, 65534), ConsumedMark(2, 0));
  EXPECT_GT(ConsumedMark(1, 0), 0u);
}

// A lost wake-up would show as the ten-second timeout: each round waits for the one before.
TEST_F(ControlPageTest, NoWakeUpIsLostInEitherDirection) {
  constexpr uint64_t kRounds = 2000;
  const absl::Time start = absl::Now();
  const auto next = [](auto doorbell, auto wait, auto ready) {
    for (;;) {
      const uint32_t seen = doorbell();
      if (ready()) return;
      wait(seen);
    }
  };
  std::thread daemon([&] {
    for (uint64_t i = 1; i <= kRounds; ++i) {
      std::optional<Record> record;
      next([&] { return page_.DaemonDoorbell(); },
           [&](uint32_t seen) { page_.DaemonWait(seen, absl::Seconds(10)); },
           [&] { return (record = *page_.Pop()).has_value(); });
      page_.header().done_step.store(record->step, std::memory_order_release);
      page_.RingTrainer();
    }
  });
  for (uint64_t i = 1; i <= kRounds; ++i) {
    ASSERT_TRUE(page_.Push({.type = RecordType::kStep, .step = i}));
    next([&] { return page_.TrainerDoorbell(); },
         [&](uint32_t seen) { page_.TrainerWait(seen, absl::Seconds(10)); },
         [&] { return page_.header().done_step.load(std::memory_order_acquire) == i; });
  }
  daemon.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(ControlPageTest, AWaitEndsAtItsTimeoutWithoutAWakeUp) {
  const absl::Time start = absl::Now();
  page_.DaemonWait(page_.DaemonDoorbell(), absl::Milliseconds(5));
  page_.TrainerWait(page_.TrainerDoorbell(), absl::Milliseconds(5));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(2));
}

}  // namespace
}  // namespace dmuon::wire
