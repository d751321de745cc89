// A CUDA call of the daemon that fails, at every call of a registration and of a step. The daemon runs in this process, so
// that its stand-in can be told what fails and asked what is left; its trainers are processes of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <string>

#include "tests/cuda/device.h"
#include "tests/e2e/daemon_here.h"
#include "tests/support/process.h"

namespace dmuon::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Held {
  uint64_t bytes, streams, events, graphs, imports;
  friend bool operator==(const Held&, const Held&) = default;
};

class CudaFault : public ::testing::Test {
 protected:
  void SetUp() override {
    daemon_ = StartDaemonHere(directory_.path() + "/run");
    ASSERT_NE(daemon_, nullptr);
    fail_ = cuda::Fake<void(const char*, int, cudaError_t)>("fake_cuda_fail");
    calls_ = cuda::Fake<uint64_t(const char*)>("fake_cuda_calls");
    counters_ = cuda::Fake<FakeCudaCounters()>("fake_cuda_counters");
    ASSERT_TRUE(fail_ != nullptr && calls_ != nullptr && counters_ != nullptr);
    bystander_ = ChildProcess(Trainer("signal", "bystander"));
    ASSERT_EQ(bystander_.ReadLine(), "step 1");
  }
  std::vector<std::string> Trainer(const std::string& mode, const std::string& job) const {
    return {Program("e2e_trainer"), mode, directory_.path() + "/run", job, "1", "0"};
  }
  Held Now() const {
    const FakeCudaCounters c = counters_();
    return {c.live_bytes, c.streams, c.events, c.graphs, c.imports};
  }
  // Once all of a session's memory is back.
  bool Back(const Held& before) const {
    return Eventually([&] { return Now() == before; }, absl::Seconds(20));
  }

  const TemporaryDirectory directory_{0755};
  std::unique_ptr<server::Daemon> daemon_;
  void (*fail_)(const char*, int, cudaError_t) = nullptr;
  uint64_t (*calls_)(const char*) = nullptr;
  FakeCudaCounters (*counters_)() = nullptr;
  ChildProcess bystander_;
};

TEST_F(CudaFault, AtEveryCallOfARegistrationAndAStepEndsInAClearErrorAndLeaksNothing) {
  ASSERT_THAT(ChildProcess(Trainer("once", "first")).ReadAll(), HasSubstr("closed"));
  Held before;
  ASSERT_TRUE(Eventually([&] {
    const Held now = Now();
    const bool same = now == before;
    before = now;
    return same && now.imports == 2;  // the bystander's
  }));
  int step = 1, faults = 0;
  for (const std::string function : {"cudaMalloc",
                                     "cudaHostAlloc",
                                     "cudaStreamCreateWithPriority",
                                     "cudaStreamCreateWithFlags",
                                     "cudaEventCreateWithFlags",
                                     "cudaIpcOpenMemHandle",
                                     "cudaPointerGetAttributes",
                                     "cuMemGetAddressRange",
                                     "cudaMemsetAsync",
                                     "cudaMemcpyAsync",
                                     "cudaLaunchKernel",
                                     "cudaGraphLaunch",
                                     "cudaGraphInstantiate",
                                     "cudaStreamBeginCapture",
                                     "cudaStreamEndCapture",
                                     "cudaEventRecord",
                                     "cudaEventQuery",
                                     "cudaStreamSynchronize",
                                     "cudaGraphUpload",
                                     "cublasLtMatmul"}) {
    const uint64_t start = calls_(function.c_str());
    ASSERT_THAT(ChildProcess(Trainer("once", "counted")).ReadAll(), HasSubstr("closed"));
    ASSERT_TRUE(Back(before));
    const uint64_t calls = calls_(function.c_str()) - start;
    int failed = 0;
    for (uint64_t n = 1; n <= calls; ++n) {
      fail_(function.c_str(), static_cast<int>(n), cudaErrorUnknown);
      const std::string said = ChildProcess(Trainer("once", "faulty")).ReadAll();
      fail_(function.c_str(), 0, cudaSuccess);
      ++faults;
      const bool clear = said.find("error ") != std::string::npos &&
                         (said.find("cudaErrorUnknown") != std::string::npos ||
                          said.find("CUBLAS_STATUS") != std::string::npos ||
                          said.find("CUDA driver error 999") != std::string::npos);
      // The client may have left before the last look at an event.
      EXPECT_TRUE(clear || said.find("closed") != std::string::npos)
          << function << " call " << n << " of " << calls << ": " << said;
      failed += clear ? 1 : 0;
      EXPECT_TRUE(Back(before)) << function << " call " << n << " of " << calls << " leaks";
      bystander_.Signal(SIGUSR1);
      ASSERT_EQ(bystander_.ReadLine(), "step " + std::to_string(++step))
          << function << " call " << n;
    }
    printf("%s: %d calls in a session and a step, %d failures told\n", function.c_str(),
           static_cast<int>(calls), failed);
  }
  printf("%d faults\n", faults);
}

}  // namespace
}  // namespace dmuon::testing
