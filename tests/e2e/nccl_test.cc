// Sessions whose ranks are on GPUs that cannot read each other's memory: what moves between them, and what happens when that
// fails. On the stand-ins for CUDA and NCCL; no other session on the daemon is harmed, and it gives back all that it took.
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/ctl/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/environment.h"
#include "tests/support/trainer.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// Operations of NCCL of the two ranks before the first step (four weights), in each reduction and in each publication.
constexpr int kBefore = 8, kReduce = 8, kPublish = 8;

Environment Apart(const std::string& devices, const std::string& faults = "",
                  const std::string& peers = "none") {
  return {{"DMUON_FAKE_CUDA_DEVICES", devices},
          {"DMUON_TEST_DEVICES", devices},
          {"DMUON_FAKE_CUDA_PEERS", peers},
          {"DMUON_FAKE_CUDA_LEAKS", "fail"},
          {"DMUON_FAKE_CUDA_FAULTS", faults}};
}

// Weights and momenta of all parameters, as the daemon keeps them, then the weights that each rank sees.
std::vector<std::vector<float>> Everything(std::vector<std::unique_ptr<Trainer>>& ranks) {
  std::vector<std::vector<float>> all;
  for (const client::Parameter& p : ranks[0]->parameters()) {
    const bool muon = p.route == client::Route::kMuon;
    for (const client::StateKind kind :
         {client::StateKind::kWeight,
          muon ? client::StateKind::kMomentum : client::StateKind::kExpAvg}) {
      const auto values = ranks[0]->Read(p.name, kind);
      EXPECT_TRUE(values.ok()) << values.status();
      all.push_back(values.value_or(std::vector<float>()));
    }
  }
  for (auto& rank : ranks) {
    for (int p = 0; p < static_cast<int>(rank->parameters().size()); ++p) {
      const auto values = rank->Weight(p);
      EXPECT_TRUE(values.ok()) << values.status();
      all.push_back(values.value_or(std::vector<float>()));
    }
  }
  return all;
}

class Nccl : public ::testing::Test {
 protected:
  // Must be the first call: the trainers of this process have the environment of the test program.
  void StartDaemon(const Environment& environment, const std::vector<std::string>& more = {}) {
    const ScopedEnvironment scope(environment);
    std::vector<std::string> flags = {"--backend=cuda"};
    flags.insert(flags.end(), more.begin(), more.end());
    daemon_ = std::make_unique<DaemonProcess>(Program("dmuond"), flags);
    auto bystander = Trainer::Start(daemon_->endpoint(), {.job = "bystander"}, 0);
    ASSERT_TRUE(bystander.ok()) << bystander.status();
    bystander_ = *std::move(bystander);
    ASSERT_TRUE(bystander_->Train(1).ok());
  }
  // The bystander steps, and the daemon gives everything back.
  void EndDaemon() {
    const absl::Status trained = bystander_->Train(1);
    EXPECT_TRUE(trained.ok()) << "the other session is harmed: " << trained;
    EXPECT_TRUE(bystander_->Close().ok());
    bystander_.reset();
    daemon_->Signal(SIGTERM);
    EXPECT_EQ(daemon_->Wait(), 0) << daemon_->Log();
    daemon_.reset();
  }
  std::vector<absl::StatusOr<std::unique_ptr<Trainer>>> Start(const JobOptions& job) {
    return OnRanks(job.world,
                   [&](int rank) { return Trainer::Start(daemon_->endpoint(), job, rank); });
  }
  // Steps up to `step`; a step that was aborted is tried again under its id. What the ranks were told.
  static std::vector<std::string> TrainThrough(std::vector<std::unique_ptr<Trainer>>& ranks,
                                               uint64_t step) {
    std::vector<std::vector<std::string>> told(ranks.size());
    OnRanks(static_cast<int>(ranks.size()), [&](int r) {
      Trainer& rank = *ranks[static_cast<size_t>(r)];
      while (rank.session().step() < step) {
        absl::Status status = rank.Backward();
        if (status.ok()) status = rank.Step().status();
        if (status.ok()) continue;
        told[static_cast<size_t>(r)].push_back(status.ToString());
        if (!absl::IsAborted(status) || told[static_cast<size_t>(r)].size() > 3) return status;
      }
      return rank.session().WaitAllWeights();
    });
    std::vector<std::string> all;
    for (const auto& of_rank : told) all.insert(all.end(), of_rank.begin(), of_rank.end());
    return all;
  }
  // What a job of two ranks ends with after three steps; `told` gets what was said on the way.
  std::vector<std::vector<float>> ThreeSteps(const JobOptions& job,
                                             std::vector<std::string>& told) {
    auto ranks = StartAll(daemon_->endpoint(), job);
    told = TrainThrough(ranks, 3);
    auto all = Everything(ranks);
    for (auto& rank : ranks) EXPECT_TRUE(rank->Close().ok());
    return all;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Trainer> bystander_;
};

TEST_F(Nccl, GivesTheBitsOfDevicesThatReadEachOther) {
  struct Case {
    int world;
    bool z3;
  };
  for (const auto& [world, z3] : {Case{2, false}, Case{2, true}, Case{4, false}, Case{4, true}}) {
    SCOPED_TRACE(::testing::Message() << world << " ranks, z3 " << z3);
    std::vector<std::vector<std::vector<float>>> results;
    for (const std::string peers : {"0-1,0-2,0-3,1-2,1-3,2-3", "none"}) {
      const ScopedEnvironment scope(Apart("4", "", peers));
      StartDaemon({});
      auto ranks = StartAll(daemon_->endpoint(), {.world = world, .z3 = z3});
      ASSERT_TRUE(TrainAll(ranks, 2).ok());
      for (auto& rank : ranks) ASSERT_TRUE(rank->Backward().ok());  // two micros in one step
      ASSERT_TRUE(TrainAll(ranks, 2).ok());
      results.push_back(Everything(ranks));
      for (auto& rank : ranks) EXPECT_TRUE(rank->Close().ok());
      EXPECT_EQ(daemon_->Log().find("session_exchanges") != std::string::npos, peers == "none");
      EndDaemon();
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

TEST_F(Nccl, OnePairWithoutAccessMakesTheWholeSessionExchangeAndShowsItsMemory) {
  const ScopedEnvironment scope(Apart("3", "", "0-1,1-2"));
  StartDaemon({});
  auto ranks = StartAll(daemon_->endpoint(), {.job = "mixed", .world = 3});
  ASSERT_TRUE(TrainAll(ranks, 3).ok());
  EXPECT_THAT(daemon_->Log(), HasSubstr("session=mixed by=\"NCCL"));
  auto admin = ctl::Admin::Connect(daemon_->endpoint(), absl::Seconds(30));
  ASSERT_TRUE(admin.ok()) << admin.status();
  const auto described = (*admin)->Session("mixed");
  ASSERT_TRUE(described.ok()) << described.status();
  ASSERT_EQ(described->memory_size(), 3);
  for (int slot = 0; slot < 3; ++slot) {
    // Two places of what it sends, at most 24 x 16 fp32, and of what it receives: that of three ranks, where it owns it.
    uint64_t out = 0, in = 0;
    for (const v1::Placement& p : described->placement()) {
      uint64_t bytes = 4;
      for (uint64_t d : p.shape()) bytes *= d;
      out = std::max(out, bytes);
      in = std::max(in, p.owner() == static_cast<uint32_t>(slot) ? 3 * bytes : bytes);
    }
    const auto aligned = [](uint64_t bytes) { return (bytes + 255) / 256 * 256; };
    EXPECT_EQ(described->memory(slot).staging_bytes(), 2 * (aligned(out) + aligned(in)));
  }
  for (auto& rank : ranks) EXPECT_TRUE(rank->Close().ok());
  EndDaemon();
}

// An asynchronous error in every operation up to the second reduction, one daemon each.
TEST_F(Nccl, AnErrorInAnyExchangeCostsAtMostItsStepAndNoBit) {
  const ScopedEnvironment scope(Apart("2"));
  std::vector<std::string> told;
  StartDaemon(Apart("2"));
  const auto expected = ThreeSteps({.world = 2}, told);
  EXPECT_THAT(told, IsEmpty());
  EndDaemon();
  for (int n = 1; n <= kBefore + kReduce + kPublish + kReduce; ++n) {
    SCOPED_TRACE(::testing::Message() << "operation " << n);
    StartDaemon(Apart("2", "ncclAsyncError:" + std::to_string(n) + "=fail(6)"));
    EXPECT_EQ(ThreeSteps({.world = 2}, told), expected);
    EXPECT_THAT(daemon_->Log(), HasSubstr("communicator_aborted epoch=1"));
    const int in_step = (n - kBefore - 1) % (kReduce + kPublish);
    if (n > kBefore && in_step < kReduce) {
      EXPECT_THAT(told, SizeIs(2));  // the step, on both ranks
      EXPECT_THAT(
          told, Each(AllOf(HasSubstr("ABORTED"), HasSubstr("the gradients did not come"),
                           HasSubstr("remote process exited"), HasSubstr("nothing was changed"))));
    } else {
      EXPECT_THAT(told, IsEmpty());  // weights come by the next epoch
    }
    EndDaemon();
  }
}

TEST_F(Nccl, AHangEndsAtItsDeadlineAndCostsAtMostItsStep) {
  const ScopedEnvironment scope(Apart("2"));
  for (const bool z3 : {false, true}) {
    std::vector<std::string> told;
    StartDaemon(Apart("2"));
    const auto expected = ThreeSteps({.world = 2, .z3 = z3}, told);
    EndDaemon();
    // In Z3 windows take the place of published weights, at no fixed number.
    for (const int n : {1, kBefore + 3, kBefore + kReduce + 1, kBefore + kReduce + kPublish + 8}) {
      SCOPED_TRACE(::testing::Message() << "operation " << n << ", z3 " << z3);
      StartDaemon(Apart("2", "ncclHang:" + std::to_string(n) + "=fail(1)"),
                  {"--exchange-timeout-seconds=0.3"});
      EXPECT_EQ(ThreeSteps({.world = 2, .z3 = z3}, told), expected);
      EXPECT_THAT(daemon_->Log(), HasSubstr("has not ended after 300ms"));
      EXPECT_THAT(told, Each(AllOf(HasSubstr("ABORTED"), HasSubstr("has not ended after 300ms"))));
      EndDaemon();
    }
  }
}

TEST_F(Nccl, WeightsThatDoNotArriveTwiceEndTheSessionWithTheReason) {
  const ScopedEnvironment scope(Apart("2"));
  StartDaemon(Apart("2", "ncclHang:" + std::to_string(kBefore + kReduce + 1) + "+=fail(1)"),
              {"--exchange-timeout-seconds=0.3"});
  auto ranks = StartAll(daemon_->endpoint(), {.world = 2});
  const std::vector<std::string> told = TrainThrough(ranks, 3);
  ASSERT_THAT(told, Not(IsEmpty()));
  EXPECT_THAT(told, Each(AllOf(HasSubstr("two epochs in a row moved nothing"),
                               HasSubstr("has not ended after 300ms"))));
  ranks.clear();
  EndDaemon();
}

TEST_F(Nccl, ACommunicatorThatDoesNotFormIsRefusedWhereTheSessionIsConfigured) {
  const ScopedEnvironment scope(Apart("2"));
  StartDaemon(Apart("2", "ncclInitHang:1=fail(1)"));
  for (const auto& rank :
       Start({.job = "late", .world = 2, .formation_timeout = absl::Milliseconds(500)})) {
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kDeadlineExceeded) << rank.status();
    EXPECT_THAT(std::string(rank.status().message()),
                HasSubstr("forming the communicator of 2 ranks"));
  }
  std::vector<std::string> told;
  (void)ThreeSteps({.job = "late", .world = 2}, told);  // the name is free
  EXPECT_THAT(told, IsEmpty());
  EndDaemon();
}

TEST_F(Nccl, ANextEpochThatDoesNotFormEndsTheSessionWithTheReason) {
  const ScopedEnvironment scope(Apart("2"));
  StartDaemon(Apart(
      "2", "ncclAsyncError:" + std::to_string(kBefore + 1) + "=fail(6);ncclInitHang:3=fail(1)"));
  auto ranks = StartAll(daemon_->endpoint(), {.world = 2, .formation_timeout = absl::Seconds(2)});
  const std::vector<std::string> told = TrainThrough(ranks, 3);
  ASSERT_THAT(told, Not(IsEmpty()));
  EXPECT_THAT(told.back(), AllOf(HasSubstr("epoch 2"), HasSubstr("forming the communicator")));
  ranks.clear();
  EndDaemon();
}

// Nothing is safe in a process whose library does not return.
TEST_F(Nccl, AnAbortThatNeverReturnsEndsTheDaemonWith70) {
  const ScopedEnvironment scope(Apart("2"));
  StartDaemon(Apart(
      "2", "ncclAsyncError:" + std::to_string(kBefore + 1) + "=fail(6);ncclCommAbort:1=block"));
  auto ranks = StartAll(daemon_->endpoint(), {.world = 2});
  absl::Status told;
  std::thread training([&] { told = TrainAll(ranks, 3); });
  EXPECT_EQ(daemon_->Wait(), 70);
  training.join();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable) << told;
  EXPECT_THAT(daemon_->Log(), HasSubstr("ncclCommAbort has not returned after 10s"));
}

// Killed inside each call of its own runtime, the first and every third after it: while it forms, sends and waits.
TEST_F(Nccl, ATrainerThatDiesInAnyCallEndsItsSessionAndNoOther) {
  const ScopedEnvironment scope(Apart("2"));
  StartDaemon(Apart("2"));
  for (const std::string function :
       {"cudaMalloc", "cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"}) {
    for (int n = 1; n <= 16; n += 3) {
      SCOPED_TRACE(::testing::Message() << function << " " << n);
      const JobOptions job{.job = "dying", .world = 2};
      ChildProcess helper;
      {
        const ScopedEnvironment dying(
            Environment{{"DMUON_FAKE_CUDA_FAULTS", function + ":" + std::to_string(n) + "=kill"}});
        helper =
            ChildProcess({Program("e2e_trainer"), "once", daemon_->endpoint(), job.job, "2", "0"});
      }
      auto rank = Trainer::Start(daemon_->endpoint(), job, 1);
      absl::Status told = rank.status();
      for (int i = 0; i < 3 && told.ok(); ++i) told = (*rank)->Train(1);
      EXPECT_THAT(told.code(), AnyOf(absl::StatusCode::kAborted, absl::StatusCode::kUnavailable))
          << told;
      EXPECT_THAT(std::string(told.message()), HasSubstr("rank 0"));
      helper.Wait();
    }
  }
  EndDaemon();
}

// A failure of calls of CUDA and NCCL from the configuration to the last step: either it costs at most a step, or every rank is
// told what failed. Nothing is left behind.
TEST_F(Nccl, AFailureOfAnyCallIsToldOrCostsAtMostItsStep) {
  const ScopedEnvironment scope(Apart("2"));
  std::vector<std::string> told;
  StartDaemon(Apart("2"));
  const auto expected = ThreeSteps({.world = 2}, told);
  EndDaemon();
  for (const std::string function :
       {"cudaMalloc", "cudaStreamCreateWithPriority", "cudaMemcpyAsync", "cudaEventRecord",
        "cudaEventQuery", "cudaStreamWaitEvent", "cudaLaunchKernel", "ncclGetUniqueId",
        "ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd",
        "ncclSend", "ncclRecv", "ncclBroadcast"}) {
    int whole = 0, ended = 0;
    for (int n = 1; n <= 89; n = n < 3 ? n + 1 : n * 8 / 5 + 1) {
      SCOPED_TRACE(::testing::Message() << function << " " << n);
      const bool nccl = function.starts_with("nccl");
      const std::string cause = nccl ? "NCCL: internal error" : "cudaErrorUnknown";
      {
        const ScopedEnvironment failing(
            Environment{{"DMUON_FAKE_CUDA_FAULTS",
                         function + ":" + std::to_string(n) + (nccl ? "=fail(3)" : "=fail(999)")}});
        daemon_ = std::make_unique<DaemonProcess>(Program("dmuond"),
                                                  std::vector<std::string>{"--backend=cuda"});
      }
      std::vector<std::unique_ptr<Trainer>> ranks;
      told.clear();
      for (auto& rank : Start({.world = 2})) {
        if (!rank.ok()) told.push_back(rank.status().ToString());
        if (rank.ok()) ranks.push_back(*std::move(rank));
      }
      if (ranks.size() == 2) told = TrainThrough(ranks, 3);
      if (ranks.size() == 2 && ranks[0]->session().step() == 3 && ranks[1]->session().step() == 3 &&
          ranks[0]->session().WaitAllWeights().ok() && ranks[1]->session().WaitAllWeights().ok()) {
        EXPECT_EQ(Everything(ranks), expected);
        ++whole;
      } else {
        EXPECT_THAT(told, Contains(HasSubstr(cause)));
        ++ended;
      }
      // A rank that is told what failed leaves, and the other may hear only that.
      EXPECT_THAT(told, Each(AnyOf(HasSubstr(cause), HasSubstr("NCCL: unhandled cuda error"),
                                   HasSubstr("has closed its session"))));
      ranks.clear();
      daemon_->Signal(SIGTERM);
      EXPECT_EQ(daemon_->Wait(), 0) << daemon_->Log();
    }
    printf("%s: three steps after all %d times, the end of the session %d times\n",
           function.c_str(), whole, ended);
  }
}

TEST_F(Nccl, TwoRanksOnOneDeviceAreRefusedByName) {
  const ScopedEnvironment scope(Apart("2"));
  StartDaemon({});
  for (const auto& rank : Start({.job = "three", .world = 3})) {
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kFailedPrecondition) << rank.status();
    EXPECT_THAT(std::string(rank.status().message()),
                AllOf(HasSubstr("cannot read each other's memory"),
                      HasSubstr("ranks 0 and 2 are both on GPU-"),
                      HasSubstr("give each rank a GPU of its own")));
  }
  EndDaemon();
}

TEST_F(Nccl, ALibraryThatIsNotThereIsNamedWhereTheSessionIsConfigured) {
  const ScopedEnvironment scope(Apart("2"));
  const TemporaryDirectory installed;
  namespace fs = std::filesystem;
  const fs::path program = Program("dmuond"), module = "libdmuon_cuda.so";
  for (const char* folder : {"bin", "lib"})
    fs::create_directory(fs::path(installed.path()) / folder);
  fs::copy_file(program, fs::path(installed.path()) / "bin" / "dmuond");
  fs::copy_file(program.parent_path() / ".." / "lib" / module,
                fs::path(installed.path()) / "lib" / module);
  const DaemonProcess daemon(installed.path() + "/bin/dmuond", {"--backend=cuda"});
  const auto statuses = OnRanks(2, [&](int rank) {
    return Trainer::Start(daemon.endpoint(), {.job = "apart", .world = 2}, rank).status();
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("cannot read each other's memory"), HasSubstr("libdmuon_nccl.so"),
                      HasSubstr("install libdmuon_nccl.so beside dmuond and libnccl.so.2")));
  }
}

}  // namespace
}  // namespace dmuon::testing
