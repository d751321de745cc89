// What a step costs the daemon where gradients and weights are exchanged. The daemon runs in this process, so that its
// stand-in can be asked; its trainers are processes of their own.
#include <signal.h>

#include <array>
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/daemon/config.h"
#include "server/daemon/daemon.h"
#include "tests/cuda/device.h"
#include "tests/support/environment.h"
#include "tests/support/process.h"

namespace dmuon::testing {
namespace {

TEST(NcclCounts, AStepAllocatesAndCreatesNothingAndWaitsOnceASlot) {
  constexpr int kSteps = 20;
  const ScopedEnvironment scope(Environment{{"DMUON_FAKE_CUDA_DEVICES", "2"},
                                            {"DMUON_TEST_DEVICES", "2"},
                                            {"DMUON_FAKE_CUDA_PEERS", "none"}});
  const TemporaryDirectory directory(0755);
  auto loaded = server::LoadConfig({.flags = {{"socket_dir", directory.path() + "/run"},
                                              {"socket_mode", "0700"},
                                              {"backend", "cuda"},
                                              {"threads", "1"},
                                              {"calibration_file", ""}}});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  server::Daemon daemon(loaded->config);
  const auto failure = daemon.Start();
  ASSERT_FALSE(failure.has_value()) << failure->status;
  std::array<ChildProcess, 2> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks[r] = ChildProcess({Program("e2e_trainer"), "signal", directory.path() + "/run", "counted",
                             "2", std::to_string(r)});
  }
  const auto step = [&](int number) {
    for (ChildProcess& rank : ranks) ASSERT_EQ(rank.ReadLine(), "step " + std::to_string(number));
  };
  step(1);
  auto* const counters = cuda::Fake<FakeCudaCounters()>("fake_cuda_counters");
  auto* const calls = cuda::Fake<uint64_t(const char*)>("fake_cuda_calls");
  ASSERT_TRUE(counters != nullptr && calls != nullptr);
  const FakeCudaCounters before = counters();
  const uint64_t sent = calls("ncclSend"), broadcast = calls("ncclBroadcast");
  for (int number = 2; number < 2 + kSteps; ++number) {
    for (ChildProcess& rank : ranks) rank.Signal(SIGUSR1);
    step(number);
  }
  const FakeCudaCounters after = counters();
  EXPECT_EQ(calls("ncclSend") - sent, 4u * kSteps);  // four parameters, to an owner from one other
  EXPECT_EQ(calls("ncclBroadcast") - broadcast, 2u * 4u * kSteps);
  EXPECT_EQ(after.allocations, before.allocations);
  EXPECT_EQ(after.created, before.created);
  EXPECT_EQ(after.waits - before.waits, 2u * kSteps);
  EXPECT_EQ(after.default_stream_uses, before.default_stream_uses);
}

}  // namespace
}  // namespace dmuon::testing
