// What a session and its steps cost the daemon where gradients and weights are exchanged. The daemon runs in this process,
// so that its stand-in can be asked; its trainers are processes of their own.
#include <signal.h>

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cuda/device.h"
#include "tests/e2e/daemon_here.h"
#include "tests/support/environment.h"
#include "tests/support/process.h"

namespace dmuon::testing {
namespace {

class NcclCounts : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;  // each on a device of its own

  void SetUp() override {
    daemon_ = StartDaemonHere(Endpoint());
    ASSERT_NE(daemon_, nullptr);
    counters_ = cuda::Fake<FakeCudaCounters()>("fake_cuda_counters");
    calls_ = cuda::Fake<uint64_t(const char*)>("fake_cuda_calls");
    bytes_ = cuda::Fake<FakeCudaBytes(int)>("fake_cuda_bytes");
    ASSERT_TRUE(counters_ != nullptr && calls_ != nullptr && bytes_ != nullptr);
    for (int d = -1; d < kRanks; ++d) EXPECT_EQ(bytes_(d).live, 0u) << "without a session";
    for (int r = 0; r < kRanks; ++r) {
      ranks_[r] = ChildProcess({Program("e2e_trainer"), "signal", Endpoint(), "counted",
                                std::to_string(kRanks), std::to_string(r)});
    }
    Await(1);
  }
  std::string Endpoint() const { return directory_.path() + "/run"; }
  void Await(int step) {
    for (ChildProcess& rank : ranks_) ASSERT_EQ(rank.ReadLine(), "step " + std::to_string(step));
  }

  const ScopedEnvironment scope_{Environment{{"DMUON_FAKE_CUDA_DEVICES", "2"},
                                             {"DMUON_TEST_DEVICES", "2"},
                                             {"DMUON_FAKE_CUDA_PEERS", "none"}}};
  const TemporaryDirectory directory_{0755};
  std::unique_ptr<server::Daemon> daemon_;
  std::array<ChildProcess, kRanks> ranks_;
  FakeCudaCounters (*counters_)() = nullptr;
  uint64_t (*calls_)(const char*) = nullptr;
  FakeCudaBytes (*bytes_)(int) = nullptr;
};

TEST_F(NcclCounts, AStepAllocatesAndCreatesNothingAndWaitsOnceASlot) {
  constexpr int kSteps = 20;
  const FakeCudaCounters before = counters_();
  const uint64_t sent = calls_("ncclSend"), broadcast = calls_("ncclBroadcast");
  for (int number = 2; number < 2 + kSteps; ++number) {
    for (ChildProcess& rank : ranks_) rank.Signal(SIGUSR1);
    Await(number);
  }
  const FakeCudaCounters after = counters_();
  EXPECT_EQ(calls_("ncclSend") - sent, 4u * kSteps);  // four parameters, to an owner from one other
  EXPECT_EQ(calls_("ncclBroadcast") - broadcast, 2u * 4u * kSteps);
  EXPECT_EQ(after.allocations, before.allocations);
  EXPECT_EQ(after.created, before.created);
  EXPECT_EQ(after.waits - before.waits, 2u * kSteps);
  EXPECT_EQ(after.default_stream_uses, before.default_stream_uses);
}

TEST_F(NcclCounts, TheDaemonHoldsWhatDmuonctlShows) {
  ChildProcess ctl(
      {Program("dmuonctl"), "--endpoint", Endpoint(), "session", "counted", "-o", "json"});
  const std::string text = ctl.ReadAll();
  ASSERT_EQ(ctl.Wait(), 0) << text;
  const nlohmann::json session = nlohmann::json::parse(text);
  uint64_t locked = 0;
  // The placement of ranks on devices is the trainers' own: rank r on device r.
  for (int slot = 0; slot < kRanks; ++slot) {
    const nlohmann::json& memory = session["slots"][slot];
    EXPECT_EQ(bytes_(slot).live, memory["state_bytes"].get<uint64_t>() +
                                     memory["workspace_bytes"].get<uint64_t>() +
                                     memory["staging_bytes"].get<uint64_t>())
        << "device " << slot;
    locked += memory["page_locked_bytes"].get<uint64_t>();
  }
  EXPECT_EQ(bytes_(-1).live, locked);
}

}  // namespace
}  // namespace dmuon::testing
