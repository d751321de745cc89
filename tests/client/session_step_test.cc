// The client's side of a session against a page whose daemon is the test: what records say, and what ends a wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <optional>
#include <thread>

#include "absl/time/clock.h"
#include "client/connection_impl.h"
#include "client/dmuon/client.h"
#include "client/session_impl.h"
#include "tests/client/fake_daemon.h"

namespace dmuon::client {
namespace {

using ::testing::HasSubstr;
using wire::ConsumedMark;
using wire::Record;
using wire::RecordType;

constexpr uint64_t kDigest = 0xabcdef;
constexpr uint32_t kBoundaries = 3;

// Boundaries 0 and 1 share a window; boundary 2 has its own.
class SessionStepTest : public ::testing::Test {
 protected:
  SessionStepTest()
      : server_(endpoint_, Welcome),
        memory_(wire::PageLayout::For(kBoundaries, 4, 2), kDigest),
        page_(memory_.page()) {
    connection_ = std::move(*Connection::Open(directory_.path()));
    auto impl = std::make_unique<Session::Impl>();
    impl_ = impl.get();
    impl_->connection = &connection_->impl();
    impl_->job = "test";
    impl_->z3 = true;
    impl_->boundaries = {{"a"}, {"b"}, {"c"}};
    impl_->parameters.resize(4);
    impl_->table_digest = kDigest;
    impl_->page = page_;
    impl_->window = {0, 0, 1};
    impl_->grad_offset.assign(4, 0);
    {
      absl::MutexLock lock(&impl_->push_mu);
      impl_->micro.assign(kBoundaries, 0);
      impl_->last_use.assign(kBoundaries, {});
      impl_->holder.assign(kBoundaries, -1);
    }
    impl_->phase = Phase::kStarted;
    session_ = std::make_unique<Session>(std::move(impl));
  }
  ~SessionStepTest() override { impl_->phase = Phase::kClosed; }  // there is nobody to tell

  // The next record; waits for it.
  Record Pop() {
    for (;;) {
      const uint32_t seen = page_.DaemonDoorbell();
      const auto record = page_.Pop();
      if (record.ok() && record->has_value()) return **record;
      page_.DaemonWait(seen, absl::Seconds(1));
    }
  }
  std::optional<Record> PopNow() { return *page_.Pop(); }
  void AnswerStep(const Record& step, uint64_t next_generation,
                  absl::Status status = absl::OkStatus(), uint32_t flags = wire::kApplied) {
    wire::Verdict& verdict = page_.header().verdict;
    verdict.step = step.step;
    verdict.next_generation = next_generation;
    verdict.code = static_cast<uint32_t>(status.code());
    verdict.flags = flags;
    verdict.total_norm = 2.5;
    verdict.clip_coefficient = 0.5;
    strncpy(verdict.reason, std::string(status.message()).c_str(), wire::kReasonBytes - 1);
    verdict.answered.fetch_add(1, std::memory_order_release);
    page_.RingTrainer();
  }
  // Runs `daemon` beside `call` and returns what `call` does.
  template <typename Call>
  auto With(std::function<void()> daemon, Call call) {
    std::thread thread(std::move(daemon));
    auto result = call();
    thread.join();
    return result;
  }

  TemporaryDirectory directory_;
  Endpoint endpoint_{directory_.path()};
  FakeAttachServer server_;
  PageMemory memory_;
  wire::ControlPage page_;
  std::unique_ptr<Connection> connection_;
  Session::Impl* impl_ = nullptr;
  std::unique_ptr<Session> session_;
};

TEST_F(SessionStepTest, ReadyCountsMicrosOfEachBoundaryInAGeneration) {
  for (int b : {2, 0, 2}) ASSERT_TRUE(session_->Ready(b).ok());
  const Record first = Pop(), second = Pop(), third = Pop();
  EXPECT_EQ(first.type, RecordType::kGradsReady);
  EXPECT_EQ(first.boundary, 2u);
  EXPECT_EQ(first.generation, 1u);
  EXPECT_EQ(first.micro, 0u);
  EXPECT_EQ(first.table_digest, kDigest);
  EXPECT_EQ(second.boundary, 0u);
  EXPECT_EQ(second.micro, 0u);
  EXPECT_EQ(third.boundary, 2u);
  EXPECT_EQ(third.micro, 1u);
}

TEST_F(SessionStepTest, StepCarriesItsIdAndOptionsAndReturnsTheVerdict) {
  page_.header().epoch = 7;
  session_->EndBackward();
  session_->EndBackward();
  Record sent;
  const auto result = With(
      [&] {
        sent = Pop();
        AnswerStep(sent, 2);
      },
      [&] { return session_->Step({.found_inf = true, .max_norm = 1.5}); });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(sent.type, RecordType::kStep);
  EXPECT_EQ(sent.step, 1u);
  EXPECT_EQ(sent.generation, 1u);
  EXPECT_EQ(sent.epoch, 7u);
  EXPECT_EQ(sent.micro, 2u);
  EXPECT_EQ(sent.flags, uint32_t{wire::kFoundInf});
  EXPECT_EQ(sent.max_norm, 1.5);
  EXPECT_EQ(result->step, 1u);
  EXPECT_TRUE(result->applied);
  EXPECT_EQ(result->total_norm, 2.5);
  EXPECT_EQ(result->clip_coefficient, 0.5);
  EXPECT_EQ(session_->step(), 1u);
  EXPECT_EQ(session_->generation(), 2u);
}

TEST_F(SessionStepTest, ASkippedStepCountsAndSaysSo) {
  const auto result = With([&] { AnswerStep(Pop(), 2, absl::OkStatus(), wire::kSkippedNonfinite); },
                           [&] { return session_->Step({}); });
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(result->applied);
  EXPECT_EQ(session_->step(), 1u);
}

TEST_F(SessionStepTest, AClipNormOfNoSenseIsRefusedAndNothingIsSent) {
  for (double max_norm :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(session_->Step({.max_norm = max_norm}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(PopNow(), std::nullopt);
}

TEST_F(SessionStepTest, AStepThatWasRefusedOutOfOrderKeepsItsGeneration) {
  ASSERT_TRUE(session_->Ready(0).ok());
  Pop();
  const auto refused =
      With([&] { AnswerStep(Pop(), 1, absl::FailedPreconditionError("step id: expected 9"), 0); },
           [&] { return session_->Step({}); });
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(session_->Ready(0).ok());
  const Record ready = Pop();
  EXPECT_EQ(ready.generation, 1u);
  EXPECT_EQ(ready.micro, 1u);
}

TEST_F(SessionStepTest, AFailedStepKeepsItsIdAndBeginsANewGeneration) {
  session_->SetPresent(2);
  ASSERT_TRUE(session_->Ready(0).ok());
  session_->EndBackward();
  Pop();
  const auto failed =
      With([&] { AnswerStep(Pop(), 5, absl::FailedPreconditionError("rank 1 differs"), 0); },
           [&] { return session_->Step({}); });
  EXPECT_EQ(failed.status(), absl::FailedPreconditionError("rank 1 differs"));
  EXPECT_EQ(session_->step(), 0u);
  EXPECT_EQ(session_->generation(), 5u);  // the one that all ranks agree on
  EXPECT_EQ(page_.PresenceWord(0), 0u);
  Record again;
  const auto retried = With(
      [&] {
        again = Pop();
        AnswerStep(again, 6);
      },
      [&] { return session_->Step({}); });
  ASSERT_TRUE(retried.ok());
  EXPECT_EQ(again.step, 1u);
  EXPECT_EQ(again.generation, 5u);
  EXPECT_EQ(again.micro, 0u);
}

TEST_F(SessionStepTest, DiscardBeginsTheNextGeneration) {
  session_->SetPresent(1);
  ASSERT_TRUE(session_->Ready(0).ok());
  ASSERT_TRUE(session_->Discard().ok());
  ASSERT_TRUE(session_->Ready(0).ok());
  EXPECT_EQ(Pop().generation, 1u);
  const Record discard = Pop();
  EXPECT_EQ(discard.type, RecordType::kDiscard);
  EXPECT_EQ(discard.generation, 1u);
  const Record ready = Pop();
  EXPECT_EQ(ready.generation, 2u);
  EXPECT_EQ(ready.micro, 0u);
  EXPECT_EQ(page_.PresenceWord(0), 0u);
}

TEST_F(SessionStepTest, AGradientWindowIsWrittenAgainOnlyWhenItsLastBoundaryWasRead) {
  ASSERT_TRUE(session_->WaitGradWritable(1).ok());  // never used
  ASSERT_TRUE(session_->Ready(0).ok());
  ASSERT_TRUE(session_->WaitGradWritable(2).ok());  // another window
  std::atomic<bool> consumed{false};
  std::atomic<bool> returned_early{false};
  const auto status = With(
      [&] {
        page_.boundary(1).grads_consumed = ConsumedMark(1, 0);  // not the boundary that wrote there
        page_.RingTrainer();
        consumed = true;
        page_.boundary(0).grads_consumed = ConsumedMark(1, 0);
        page_.RingTrainer();
      },
      [&] {
        const absl::Status s = session_->WaitGradWritable(1);
        returned_early = !consumed;
        return s;
      });
  EXPECT_TRUE(status.ok());
  EXPECT_FALSE(returned_early);
}

TEST_F(SessionStepTest, AfterAVerdictEveryWindowMayBeWritten) {
  ASSERT_TRUE(session_->Ready(0).ok());
  Pop();
  const auto failed =
      With([&] { AnswerStep(Pop(), 2, absl::DeadlineExceededError("rank 1 did not come"), 0); },
           [&] { return session_->Step({}); });
  ASSERT_FALSE(failed.ok());
  EXPECT_TRUE(session_->WaitGradWritable(0).ok());
}

TEST_F(SessionStepTest, WaitWeightsWaitsForTheVersionOfTheLastStep) {
  ASSERT_TRUE(session_->WaitWeights(1).ok());  // version 0
  impl_->step = 3;
  page_.boundary(1).weights_version = 2;
  std::atomic<bool> published{false}, early{false};
  ASSERT_TRUE(With(
                  [&] {
                    published = true;
                    page_.boundary(1).weights_version = 3;
                    page_.RingTrainer();
                  },
                  [&] {
                    const auto s = session_->WaitWeights(1);
                    early = !published;
                    return s;
                  })
                  .ok());
  EXPECT_FALSE(early);
}

TEST_F(SessionStepTest, MaterializeWaitsForItsOwnTicket) {
  page_.boundary(0).window_grant = 0;
  Record sent;
  ASSERT_TRUE(With(
                  [&] {
                    sent = Pop();
                    page_.boundary(0).window_grant = sent.ticket;
                    page_.RingTrainer();
                  },
                  [&] { return session_->Materialize(0); })
                  .ok());
  EXPECT_EQ(sent.type, RecordType::kMaterialize);
  EXPECT_GT(sent.ticket, 0u);
}

TEST_F(SessionStepTest, TwoBoundariesCannotHoldOneWindow) {
  ASSERT_TRUE(With(
                  [&] {
                    page_.boundary(0).window_grant = Pop().ticket;
                    page_.RingTrainer();
                  },
                  [&] { return session_->Materialize(0); })
                  .ok());
  const auto refused = session_->Materialize(1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("held by boundary 'a'"));
  EXPECT_EQ(session_->Release(1).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(session_->Release(0).ok());
  EXPECT_EQ(Pop().type, RecordType::kRelease);
  EXPECT_TRUE(With(
                  [&] {
                    page_.boundary(1).window_grant = Pop().ticket;
                    page_.RingTrainer();
                  },
                  [&] { return session_->Materialize(1); })
                  .ok());
}

TEST_F(SessionStepTest, AFullRingIsWaitedForAndLosesNothing) {
  const uint32_t capacity = page_.layout().ring_capacity;
  const int total = static_cast<int>(capacity) * 3;
  int in_order = 0;
  const absl::Status status = With(
      [&] {
        for (int i = 0; i < total; ++i) in_order += Pop().micro == static_cast<uint32_t>(i);
      },
      [&] {
        for (int i = 0; i < total; ++i) {
          const absl::Status s = session_->Ready(0);
          if (!s.ok()) return s;
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(in_order, total);
}

TEST_F(SessionStepTest, RecordsOfSeveralThreadsDoNotMix) {
  constexpr int kEach = 500;
  std::vector<std::thread> threads;
  for (int b = 0; b < 3; ++b) {
    threads.emplace_back([this, b] {
      for (int i = 0; i < kEach; ++i) EXPECT_TRUE(session_->Ready(b).ok());
    });
  }
  uint32_t next[kBoundaries] = {};
  for (int i = 0; i < 3 * kEach; ++i) {
    const Record record = Pop();
    ASSERT_LT(record.boundary, kBoundaries);
    EXPECT_EQ(record.micro, next[record.boundary]++);
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(SessionStepTest, TooManyMicrosAreRefusedBeforeTheyWrapIntoTheGeneration) {
  {
    absl::MutexLock lock(&impl_->push_mu);
    impl_->micro[0] = std::numeric_limits<uint16_t>::max();
  }
  EXPECT_EQ(session_->Ready(0).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(PopNow(), std::nullopt);
}

TEST_F(SessionStepTest, ABoundaryOutOfRangeIsRefused) {
  for (int boundary : {-1, 3}) {
    EXPECT_EQ(session_->Ready(boundary).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(session_->WaitWeights(boundary).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(session_->WaitGradWritable(boundary).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(session_->Materialize(boundary).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(session_->Release(boundary).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(PopNow(), std::nullopt);
}

TEST_F(SessionStepTest, CallsBeforeStartAndAfterCloseAreRefused) {
  impl_->phase = Phase::kConfigured;
  EXPECT_EQ(session_->Step({}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(session_->Ready(0).code(), absl::StatusCode::kFailedPrecondition);
  impl_->phase = Phase::kClosed;
  EXPECT_EQ(session_->Discard().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(PopNow(), std::nullopt);
}

TEST_F(SessionStepTest, AFailedSessionEndsTheWaitWithItsReason) {
  const auto result = With(
      [&] {
        Pop();
        strcpy(page_.header().failure, "rank 1 (pid 77) is dead");
        page_.header().status = static_cast<uint32_t>(wire::SessionStatus::kFailed);
        page_.RingTrainer();
      },
      [&] { return session_->Step({}); });
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("rank 1 (pid 77) is dead"));
  EXPECT_EQ(session_->Ready(0).code(), absl::StatusCode::kUnavailable);  // the session is lost
}

TEST_F(SessionStepTest, AnAnswerThatIsThereCountsThoughTheSessionHasFailed) {
  impl_->step = 3;
  page_.boundary(1).weights_version = 3;
  page_.header().status = static_cast<uint32_t>(wire::SessionStatus::kFailed);
  EXPECT_TRUE(session_->WaitWeights(1).ok());
  EXPECT_EQ(session_->WaitWeights(0).code(), absl::StatusCode::kUnavailable);
}

TEST_F(SessionStepTest, ADeadDaemonEndsTheWaitWithinASecond) {
  server_.HangUp();
  const absl::Time begin = absl::Now();
  const auto result = session_->Step({});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
}

TEST_F(SessionStepTest, AnInterruptEndsTheWaitWithCancelled) {
  connection_->SetInterruptCheck([] { return true; });
  EXPECT_EQ(session_->Step({}).status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(session_->Step({}).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(SessionStepTest, AForkedChildIsRefusedAndHarmsNothing) {
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        session_->Ready(0).code() == absl::StatusCode::kFailedPrecondition &&
        session_->Step({}).status().code() == absl::StatusCode::kFailedPrecondition &&
        connection_->OpenSession({}).status().code() == absl::StatusCode::kFailedPrecondition;
    session_.reset();
    connection_.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(PopNow(), std::nullopt);
  EXPECT_TRUE(session_->Ready(0).ok());
}

}  // namespace
}  // namespace dmuon::client
