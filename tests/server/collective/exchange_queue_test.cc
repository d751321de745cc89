// The list of exchanges and its epochs, on communicators that move nothing.
#include "server/collective/exchange_queue.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = QueuedExchange::Kind;
using State = DeviceCommunicator::State;

constexpr int kSlots = 2;

class IdleCommunicator final : public DeviceCommunicator {
 public:
  explicit IdleCommunicator(const absl::Status& refused) : cause_(refused), formed_(refused.ok()) {}
  State state() const override { return cause_.ok() ? State::kReady : State::kAborted; }
  bool formed() const override { return formed_; }
  absl::Status cause() const override { return cause_; }
  absl::StatusOr<uint64_t> Submit(int, kernels::Stream, const Exchange&) override { return cause_; }
  absl::StatusOr<bool> Ended(int, uint64_t) const override { return cause_; }
  uint64_t digest(int) const override { return 0; }
  void Abort(const absl::Status& cause) override { cause_ = cause; }

 private:
  absl::Status cause_;
  const bool formed_;
};

class IdleCommunicators final : public DeviceCommunicators {
 public:
  absl::StatusOr<std::string> NewId() override { return absl::StrCat("id ", ++ids_); }
  absl::StatusOr<std::unique_ptr<DeviceCommunicator>> Create(
      const DeviceCommunicatorOptions& options) override {
    made.push_back(absl::StrCat(options.epoch, " by ", options.id));
    return std::make_unique<IdleCommunicator>(refusal);
  }
  std::string description() const override { return "idle"; }

  std::vector<std::string> made;
  absl::Status refusal;  // of those made from now on

 private:
  int ids_ = 0;
};

class ExchangeQueueTest : public ::testing::Test {
 protected:
  // Parameters 0 and 1 of boundary 0, parameter 2 of boundary 1; slot 0 owns 0 and 2, slot 1 owns 1.
  ExchangeQueueTest() {
    for (int p = 0; p < 3; ++p) plan_.transfers.push_back({ParameterId(p), SlotId(p % 2), {}});
    plan_.parameters = {{ParameterId(0), ParameterId(1)}, {ParameterId(2)}};
    DeviceCommunicatorOptions options;
    options.devices = {"GPU-0", "GPU-1"};
    queue_ = std::make_unique<ExchangeQueue>(plan_, library_, options);
  }
  void SetUp() override { ASSERT_TRUE(queue_->Form().ok()); }

  bool Gradients(int boundary, uint64_t generation, uint32_t micros) {
    bool changed = false;
    return queue_->AppendGradients(
        BoundaryId(boundary), generation, [&] { return micros; }, changed);
  }
  // "g0" gradient, "w1" weight, "t2>0" window, of entries [from, end).
  std::vector<std::string> Entries(uint64_t from = 0) const {
    std::vector<std::string> all;
    for (uint64_t at = from; at < queue_->end(); ++at) {
      const QueuedExchange& e = queue_->At(at);
      const int p = e.parameter.value();
      all.push_back(e.kind == Kind::kGradient
                        ? absl::StrCat("g", p, " ", e.generation, ".", e.micro)
                    : e.kind == Kind::kWeight ? absl::StrCat("w", p)
                                              : absl::StrCat("t", p, ">", e.to.value()));
    }
    return all;
  }
  void FinishAll(uint64_t position) {
    for (int s = 0; s < kSlots; ++s) queue_->Finish(SlotId(s), position);
  }

  Plan plan_;
  IdleCommunicators library_;
  std::unique_ptr<ExchangeQueue> queue_;
};

TEST_F(ExchangeQueueTest, AMicroIsAppendedOnceWhoeverSeesItAndAnOldGenerationNever) {
  EXPECT_TRUE(Gradients(1, 4, 1));
  EXPECT_TRUE(Gradients(0, 4, 2));
  EXPECT_TRUE(Gradients(0, 4, 2));
  EXPECT_TRUE(Gradients(0, 5, 1));
  EXPECT_TRUE(Gradients(0, 4, 3));
  EXPECT_THAT(Entries(),
              ElementsAre("g2 4.0", "g0 4.0", "g1 4.0", "g0 4.1", "g1 4.1", "g0 5.0", "g1 5.0"));
  EXPECT_FALSE(queue_->At(1).last);
  EXPECT_TRUE(queue_->At(2).last);
}

TEST_F(ExchangeQueueTest, AWindowIsAskedOfTheOwnersBesidesTheSlotItself) {
  EXPECT_EQ(queue_->AppendWindow(plan_.parameters[0], SlotId(1)), 1u);
  EXPECT_EQ(queue_->AppendWindow(plan_.parameters[1], SlotId(0)), 1u);
  EXPECT_THAT(Entries(), ElementsAre("t0>1"));
}

TEST_F(ExchangeQueueTest, GradientsAndWindowsLeaveRoomForWeightsAndAreAskedForAgain) {
  uint32_t micros = 0;
  while (Gradients(1, 1, micros + 1)) ++micros;
  EXPECT_FALSE(queue_->AppendWindow(plan_.parameters[0], SlotId(1)).has_value());
  const uint64_t full = queue_->end();
  for (int p = 0; p < 3; ++p) queue_->AppendWeight(ParameterId(p));
  for (int p = 0; p < 3; ++p) queue_->AppendWeight(ParameterId(p));
  EXPECT_THAT(Entries(full), ElementsAre("w0", "w1", "w2", "w0", "w1", "w2"));
  EXPECT_FALSE(Gradients(1, 1, micros + 1));
  queue_->Finish(SlotId(0), queue_->end());
  EXPECT_FALSE(Gradients(1, 1, micros + 1)) << "the other slot still reads them";
  queue_->Finish(SlotId(1), queue_->end());
  EXPECT_TRUE(Gradients(1, 1, micros + 1));
}

TEST_F(ExchangeQueueTest, WhatIsFinishedIsWhatAllSlotsHaveFinished) {
  const uint64_t position = queue_->AppendWeight(ParameterId(0));
  queue_->Finish(SlotId(0), position);
  EXPECT_EQ(queue_->finished_by_all(), 0u);
  EXPECT_EQ(queue_->AwaitFinished(position, [] { return absl::AbortedError("over"); }).code(),
            absl::StatusCode::kAborted);
  queue_->Finish(SlotId(1), position);
  EXPECT_TRUE(queue_->AwaitFinished(position, [] { return absl::OkStatus(); }).ok());
}

TEST_F(ExchangeQueueTest, TheNextEpochBeginsWhereSomeSlotHasNotFinishedAndLosesSubmittedGradients) {
  EXPECT_TRUE(Gradients(0, 1, 1));
  queue_->AppendWeight(ParameterId(2));
  EXPECT_TRUE(Gradients(1, 1, 1));
  queue_->Finish(SlotId(0), 2);
  queue_->Finish(SlotId(1), 1);
  queue_->current().communicator->Abort(absl::UnavailableError("the link is down"));
  EXPECT_TRUE(queue_->Leave(3).ok());
  EXPECT_EQ(queue_->epoch(), 1u) << "a slot is still in it";
  EXPECT_TRUE(queue_->Leave(2).ok());
  EXPECT_EQ(queue_->epoch(), 2u);
  const ExchangeQueue::Epoch next = queue_->current();
  EXPECT_EQ(next.first, 1u);
  EXPECT_EQ(next.void_before, 3u);
  EXPECT_EQ(next.communicator->state(), State::kReady);
  EXPECT_THAT(std::string(next.lost.message()), HasSubstr("the link is down"));
  EXPECT_THAT(library_.made, ElementsAre("1 by id 1", "2 by id 2"));
  // What slot 0 had finished before stays finished, and is kept for slot 1.
  EXPECT_EQ(queue_->finished_by_all(), 1u);
  queue_->Finish(SlotId(1), 2);
  EXPECT_EQ(queue_->finished_by_all(), 2u);
}

TEST_F(ExchangeQueueTest, TwoEpochsInARowThatMovedNothingAreTheEnd) {
  queue_->AppendWeight(ParameterId(2));
  for (int round = 1; round <= 2; ++round) {
    queue_->current().communicator->Abort(absl::DeadlineExceededError("it hangs"));
    EXPECT_TRUE(queue_->Leave(1).ok());
    const absl::Status next = queue_->Leave(1);
    if (round == 1) {
      EXPECT_TRUE(next.ok()) << next;
      continue;
    }
    EXPECT_EQ(next.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(next.message()), HasSubstr("two epochs in a row moved nothing"));
    EXPECT_THAT(std::string(next.message()), HasSubstr("it hangs"));
  }
  EXPECT_THAT(library_.made, ElementsAre("1 by id 1", "2 by id 2"));
}

TEST_F(ExchangeQueueTest, AnEpochThatNeverFormedIsNotFollowedByAnother) {
  library_.refusal = absl::DeadlineExceededError("forming");
  queue_->AppendWeight(ParameterId(2));
  queue_->current().communicator->Abort(absl::UnavailableError("the link is down"));
  EXPECT_TRUE(queue_->Leave(0).ok());
  EXPECT_TRUE(queue_->Leave(0).ok());
  FinishAll(1);
  EXPECT_TRUE(queue_->Leave(1).ok());
  EXPECT_THAT(std::string(queue_->Leave(1).message()), HasSubstr("forming"));
  EXPECT_THAT(library_.made, ElementsAre("1 by id 1", "2 by id 2"));
}

}  // namespace
}  // namespace dmuon::server
