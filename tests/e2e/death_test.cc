// Processes that die: trainers at every moment, and the daemon.
#include <signal.h>

#include <filesystem>

#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class Death : public E2eTest {
 protected:
  // A rank that waits for `helper`'s: what it is told when that one is gone.
  static void ExpectToldAboutRankZero(const absl::Status& status, pid_t pid) {
    EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kAborted, absl::StatusCode::kUnavailable))
        << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("rank 0"), HasSubstr(std::to_string(pid))));
  }
  bool Gone(const std::string& job) {
    return Eventually([&] { return Summary(job).name().empty(); });
  }
};

TEST_F(Death, OfATrainerThatIsAttachedLeavesNothing) {
  ChildProcess helper = Helper("attach", {.job = "attached"}, 0);
  ASSERT_EQ(helper.ReadLine(), "attached");
  helper.Signal(SIGKILL);
  EXPECT_EQ(helper.Wait(), 128 + SIGKILL);
}

TEST_F(Death, DuringFormationEndsTheWaitOfTheOthers) {
  const JobOptions job{.job = "forming", .world = 2};
  ChildProcess helper = Helper("form", job, 0);
  ASSERT_EQ(helper.ReadLine(), "attached");
  ASSERT_TRUE(Eventually([&] { return Summary("forming").attached() == 1; }));
  EXPECT_EQ(Summary("forming").state(), v1::SESSION_STATE_FORMING);
  const absl::Time killed = absl::Now();
  helper.Signal(SIGKILL);
  ASSERT_TRUE(Gone("forming"));
  EXPECT_LT(absl::Now() - killed, absl::Seconds(5));
  auto ranks = StartAll(endpoint(), job);  // the name is free
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

TEST_F(Death, DuringTheCallThatOthersAreInTellsThem) {
  const JobOptions job{.job = "collective", .world = 3};
  ChildProcess helper = Helper("form", job, 0);
  ASSERT_EQ(helper.ReadLine(), "attached");
  absl::Status told;
  std::thread other([&] {
    auto connection = client::Connection::Open(endpoint());
    told = (*connection)->OpenSession(SmallTable(job, 1)).status();
  });
  EXPECT_TRUE(Eventually([&] { return Summary("collective").attached() == 2; }));
  helper.Signal(SIGKILL);
  other.join();
  ExpectToldAboutRankZero(told, helper.pid());
}

TEST_F(Death, BetweenStepsFailsTheNextStepAtOnce) {
  const JobOptions job{.job = "between", .world = 2};
  ChildProcess helper = Helper("stop", job, 0);
  auto rank = Trainer::Start(endpoint(), job, 1);
  ASSERT_TRUE(rank.ok()) << rank.status();
  ASSERT_TRUE((*rank)->Train(1).ok());
  ASSERT_EQ(helper.ReadLine(), "step 1");
  ASSERT_EQ(helper.ReadLine(), "sending");
  helper.Signal(SIGKILL);
  helper.Wait();
  // What it had sent counts: if its STEP was there already, this one is complete, and the next is not.
  const absl::Time begin = absl::Now();
  absl::Status status;
  for (int i = 0; i < 2 && status.ok(); ++i) status = (*rank)->Train(1);
  ExpectToldAboutRankZero(status, helper.pid());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));  // and not after the step's time-out
}

TEST_F(Death, BeforeTheSessionIsReadyTellsTheOthers) {
  const JobOptions job{.job = "half-open", .world = 2};
  ChildProcess helper = Helper("open", job, 0);
  absl::Status told;
  std::thread other([&] { told = Trainer::Start(endpoint(), job, 1).status(); });
  EXPECT_EQ(helper.ReadLine(), "opened");
  helper.Signal(SIGKILL);
  other.join();
  ExpectToldAboutRankZero(told, helper.pid());
}

TEST_F(Death, WhileTheOthersAreInTheStepTellsThem) {
  const JobOptions job{.job = "in-step", .world = 2};
  ChildProcess helper = Helper("idle", job, 0);
  auto rank = Trainer::Start(endpoint(), job, 1);
  ASSERT_TRUE(rank.ok()) << rank.status();
  ASSERT_TRUE((*rank)->Train(1).ok());
  ASSERT_EQ(helper.ReadLine(), "step 1");
  absl::Status told;
  std::thread stepping([&] { told = (*rank)->Train(1); });
  EXPECT_TRUE(Eventually([&] { return Summary("in-step").state() == v1::SESSION_STATE_STEPPING; }));
  helper.Signal(SIGKILL);
  stepping.join();
  ExpectToldAboutRankZero(told, helper.pid());
}

TEST_F(Death, OfOneJobLetsTheNextOfItsNameBegin) {
  const JobOptions job{.job = "again", .world = 2};
  std::vector<ChildProcess> helpers;
  for (int r = 0; r < 2; ++r) helpers.push_back(Helper("train", job, r));
  ASSERT_EQ(helpers[0].ReadLine(), "step 1");
  for (ChildProcess& helper : helpers) helper.Signal(SIGKILL);
  ASSERT_TRUE(Gone("again"));
  auto ranks = StartAll(endpoint(), job);
  auto fresh = StartAll(endpoint(), {.job = "fresh", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 3).ok());
  ASSERT_TRUE(TrainAll(fresh, 3).ok());
  EXPECT_EQ(*ranks[0]->Weight(0), *fresh[0]->Weight(0));  // nothing of the dead job is in it
}

TEST_F(Death, OfOneJobDoesNotDisturbAnother) {
  auto calm = StartAll(endpoint(), {.job = "calm", .world = 2});
  for (int round = 0; round < 5; ++round) {
    ChildProcess helper = Helper("train", {.job = "noisy"}, 0);
    ASSERT_EQ(helper.ReadLine(), "step 1");
    helper.Signal(SIGKILL);
    ASSERT_TRUE(TrainAll(calm, 2).ok());
    helper.Wait();
  }
  auto alone = StartAll(endpoint(), {.job = "alone", .world = 2});
  ASSERT_TRUE(TrainAll(alone, 10).ok());
  EXPECT_EQ(*calm[1]->Weight(2), *alone[0]->Weight(2));
}

TEST_F(Death, FiftyTimesLeavesMemoryDescriptorsAndMappingsFlat) {
  const auto round = [&] {
    ChildProcess helper = Helper("train", {.job = "round"}, 0);
    EXPECT_EQ(helper.ReadLine(), "step 1");
    helper.Signal(SIGKILL);
    EXPECT_TRUE(Gone("round"));
  };
  for (int i = 0; i < 10; ++i) round();  // pools and caches fill
  ProcessUse before;
  ASSERT_TRUE(Eventually([&] {
    before = daemon().Use();
    return before.descriptors <= this->before().descriptors;
  })) << "the last of them has left";
  for (int i = 0; i < 50; ++i) round();
  ProcessUse after;
  EXPECT_TRUE(Eventually([&] {
    after = daemon().Use();
    return after.descriptors <= before.descriptors && after.memfd_mappings <= before.memfd_mappings;
  })) << DescriptorsOf(daemon().pid());
  printf(
      "descriptors %d -> %d, arena mappings %d -> %d, mappings %d -> %d, resident KiB %ld -> %ld\n",
      before.descriptors, after.descriptors, before.memfd_mappings, after.memfd_mappings,
      before.mappings, after.mappings, before.rss_kib, after.rss_kib);
  EXPECT_LE(after.mappings, before.mappings + 8);
  EXPECT_LE(after.rss_kib, before.rss_kib + 2048);  // 50 sessions of this size are 5 MiB
}

class DaemonEnds : public E2eTest, public ::testing::WithParamInterface<int> {
 protected:
  DaemonEnds() : E2eTest({.bystander = false}) {}
};

TEST_P(DaemonEnds, BySignalIsCleanAndTellsTheTrainers) {
  NoDaemonLeft();
  auto ranks = StartAll(endpoint(), {.job = "told", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 2).ok());
  daemon().Signal(GetParam());
  absl::Status status;
  for (int i = 0; i < 1000 && status.ok(); ++i) status = TrainAll(ranks, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(daemon().Wait(), 0);
  EXPECT_FALSE(std::filesystem::exists(endpoint())) << "the daemon made the directory, and left it";
}

INSTANTIATE_TEST_SUITE_P(Signals, DaemonEnds, ::testing::Values(SIGTERM, SIGINT),
                         [](const auto& info) {
                           return std::string(info.param == SIGTERM ? "SIGTERM" : "SIGINT");
                         });

class DaemonDies : public E2eTest {
 protected:
  DaemonDies() : E2eTest({.bystander = false}) {}
};

TEST_F(DaemonDies, EveryWaitEndsWithinASecondOrTwo) {
  NoDaemonLeft();
  auto ranks = StartAll(endpoint(), {.job = "lost", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  ASSERT_TRUE(ranks[0]->Backward().ok());
  absl::Status in_step, in_open;
  absl::Time told_step, told_open;
  std::thread stepping([&] {
    in_step = ranks[0]->Step().status();  // rank 1 never comes
    told_step = absl::Now();
  });
  std::thread opening([&] {
    auto connection = client::Connection::Open(endpoint());
    in_open = (*connection)->OpenSession(SmallTable({.job = "half", .world = 2}, 0)).status();
    told_open = absl::Now();
  });
  ASSERT_TRUE(Eventually([&] { return Summary("half").attached() == 1; }));
  const absl::Time killed = absl::Now();
  daemon().Signal(SIGKILL);
  stepping.join();
  opening.join();
  EXPECT_EQ(in_step.code(), absl::StatusCode::kUnavailable) << in_step;
  EXPECT_THAT(std::string(in_step.message()), HasSubstr("is dead"));
  EXPECT_EQ(in_open.code(), absl::StatusCode::kUnavailable) << in_open;
  EXPECT_LT(told_step - killed, absl::Seconds(2));
  EXPECT_LT(told_open - killed, absl::Seconds(2));
  EXPECT_EQ(ranks[1]->Step().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client::Connection::Open(endpoint()).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace dmuon::testing
