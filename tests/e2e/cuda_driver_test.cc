// A driver that fails for good, or does not answer: what becomes of trainers and of the daemon. On the stand-ins for CUDA.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/support/daemon_process.h"
#include "tests/support/environment.h"

namespace dmuon::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

class CudaDriver : public ::testing::Test {
 protected:
  void StartDaemon(const std::string& faults) {
    const ScopedEnvironment scope({{"DMUON_FAKE_CUDA_FAULTS", faults}});
    daemon_ = std::make_unique<DaemonProcess>(
        Program("dmuond"), std::vector<std::string>{"--backend=cuda", "--drain-timeout-seconds=1"});
  }
  ChildProcess Train(const std::string& mode) {
    return ChildProcess({Program("e2e_trainer"), mode, daemon_->endpoint(), "job", "1", "0"});
  }
  DaemonProcess& daemon() { return *daemon_; }
  void AwaitLog(const std::string& text) {
    EXPECT_TRUE(Eventually([&] { return daemon().Log().find(text) != std::string::npos; })) << text;
  }

 private:
  std::unique_ptr<DaemonProcess> daemon_;
};

// The stand-in ends a process that frees memory which another has open.
TEST_F(CudaDriver, MemoryWhoseMappingCannotBeClosedIsNotFreed) {
  StartDaemon("cudaIpcCloseMemHandle:1+=fail(999)");
  ChildProcess trainer = Train("once");
  EXPECT_THAT(trainer.ReadAll(),
              HasSubstr("INTERNAL: session 'job': its arenas are not closed and must not be freed: "
                        "cudaIpcCloseMemHandle: cudaErrorUnknown"));
  EXPECT_EQ(trainer.Wait(), 1);
}

TEST_F(CudaDriver, ADaemonWhoseDeviceHasFailedEndsSoThatAnotherCanBegin) {
  StartDaemon("execute:100=fail(700)");
  ChildProcess trainer = Train("steps");
  EXPECT_THAT(trainer.ReadAll(), HasSubstr("error "));
  EXPECT_EQ(daemon().Wait(), 1);
  EXPECT_THAT(daemon().Log(), HasSubstr("device_failed"));
  EXPECT_THAT(daemon().Log(), HasSubstr("cudaErrorIllegalAddress"));
}

TEST_F(CudaDriver, ASecondSignalEndsADaemonWhoseDriverDoesNotAnswer) {
  for (const char* call : {"cudaMalloc:2=block", "execute:60=block", "cudaIpcOpenMemHandle:1=block",
                           "cudaStreamSynchronize:30+=block"}) {
    StartDaemon(call);
    ChildProcess trainer = Train("steps");
    AwaitLog("session_open");
    daemon().Signal(SIGTERM);
    AwaitLog("the daemon was drained");
    daemon().Signal(SIGTERM);
    const absl::Time start = absl::Now();
    // 0: it was asked before it came to that call.
    EXPECT_THAT(daemon().Wait(), AnyOf(0, 1)) << call;
    EXPECT_LT(absl::Now() - start, absl::Seconds(15)) << call;
    trainer.Signal(SIGKILL);
  }
}

}  // namespace
}  // namespace dmuon::testing
