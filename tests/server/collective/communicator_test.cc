// The contract of Communicator, over the explicit list of its implementations.

#include "server/collective/communicator.h"

#include <functional>
#include <memory>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/collective/local_communicator.h"

namespace dmuon::server {
namespace {

using ::testing::ElementsAre;

struct Maker {
  const char* name;
  std::function<std::unique_ptr<Communicator>(int slots)> make;
};

class CommunicatorTest : public ::testing::TestWithParam<Maker> {};

absl::Span<const std::byte> Bytes(const uint64_t& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof(value)};
}
uint64_t Value(absl::Span<const std::byte> message) {
  uint64_t value;
  memcpy(&value, message.data(), sizeof(value));
  return value;
}

TEST_P(CommunicatorTest, ARoundIsCompleteWhenAllHavePosted) {
  auto c = GetParam().make(2);
  c->Post(SlotId(0), Bytes(10));
  EXPECT_EQ(c->State(SlotId(0)), RoundState::kOpen);
  EXPECT_THAT(c->Missing(SlotId(0)), ElementsAre(SlotId(1)));
  c->Post(SlotId(1), Bytes(11));
  for (int s : {0, 1}) {
    EXPECT_EQ(c->State(SlotId(s)), RoundState::kComplete);
    EXPECT_EQ(Value(c->Message(SlotId(s), SlotId(0))), 10u);
    EXPECT_EQ(Value(c->Message(SlotId(s), SlotId(1))), 11u);
  }
}

TEST_P(CommunicatorTest, ASlowReaderStillSeesItsRoundWhenAFastOneHasPostedTheNext) {
  auto c = GetParam().make(2);
  c->Post(SlotId(0), Bytes(1));
  c->Post(SlotId(1), Bytes(2));
  c->Post(SlotId(0), Bytes(3));
  EXPECT_EQ(c->State(SlotId(1)), RoundState::kComplete);
  EXPECT_EQ(Value(c->Message(SlotId(1), SlotId(0))), 1u);
}

TEST_P(CommunicatorTest, AnAbortIsForAllWhoPostedAndNeverUndoesACompleteRound) {
  auto c = GetParam().make(2);
  c->Post(SlotId(0), Bytes(1));
  c->Abort(SlotId(0), absl::DeadlineExceededError("late"));
  c->Abort(SlotId(0), absl::InternalError("second"));
  EXPECT_EQ(c->State(SlotId(0)), RoundState::kAborted);
  EXPECT_EQ(c->Cause(SlotId(0)).code(), absl::StatusCode::kDeadlineExceeded);
  c->Post(SlotId(1), Bytes(2));
  EXPECT_EQ(c->State(SlotId(1)), RoundState::kOpen);
  c->Post(SlotId(0), Bytes(3));
  c->Abort(SlotId(1), absl::InternalError("too late"));
  EXPECT_EQ(c->State(SlotId(1)), RoundState::kComplete);
}

TEST_P(CommunicatorTest, GoneIsRememberedWithItsFirstReason) {
  auto c = GetParam().make(2);
  EXPECT_TRUE(c->Gone(SlotId(1)).ok());
  c->SetGone(SlotId(1), absl::AbortedError("died"));
  c->SetGone(SlotId(1), absl::InternalError("again"));
  EXPECT_EQ(c->Gone(SlotId(1)).code(), absl::StatusCode::kAborted);
}

TEST_P(CommunicatorTest, ManyRoundsOnThreadsAgree) {
  constexpr int kSlots = 4, kRounds = 500;
  auto c = GetParam().make(kSlots);
  std::vector<std::thread> threads;
  std::vector<uint64_t> sums(kSlots, 0);
  for (int s = 0; s < kSlots; ++s) {
    threads.emplace_back([&, s] {
      for (uint64_t r = 0; r < kRounds; ++r) {
        const uint64_t mine = r * 10 + s;
        c->Post(SlotId(s), Bytes(mine));
        while (c->State(SlotId(s)) == RoundState::kOpen) std::this_thread::yield();
        for (int f = 0; f < kSlots; ++f)
          sums[s] = sums[s] * 31 + Value(c->Message(SlotId(s), SlotId(f)));
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (int s = 1; s < kSlots; ++s) EXPECT_EQ(sums[s], sums[0]);
}

INSTANTIATE_TEST_SUITE_P(All, CommunicatorTest,
                         ::testing::Values(Maker{"local",
                                                 [](int slots) -> std::unique_ptr<Communicator> {
                                                   return std::make_unique<LocalCommunicator>(
                                                       slots, 3, 64);
                                                 }}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dmuon::server
