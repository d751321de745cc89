// Device memory of trainers that die, and drivers that do not answer. On the stand-ins for CUDA.
#include <signal.h>

#include <cstdio>

#include "tests/e2e/e2e_test_base.h"
#include "tests/support/environment.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class CudaDeath : public E2eTest {};

// TearDown holds descriptors and mappings against what they were.
TEST_F(CudaDeath, AThousandTimesLeavesMemoryDescriptorsAndMappingsFlat) {
  constexpr int kRounds = 1000, kWarmUp = 5;
  constexpr long kGrowthKib = 8192;
  ProcessUse early;
  for (int round = 0; round < kRounds; ++round) {
    if (round == kWarmUp) early = daemon().Use();
    ChildProcess helper = Helper("idle", {.job = "killed"}, 0);
    ASSERT_EQ(helper.ReadLine(), "step 1");
    helper.Signal(SIGKILL);
    helper.Wait();
  }
  ASSERT_TRUE(Eventually([this] { return Sessions().size() == 1; }));
  ProcessUse late;
  EXPECT_TRUE(Eventually([&] {
    late = daemon().Use();
    return late.descriptors <= before().descriptors &&
           late.memfd_mappings <= before().memfd_mappings;
  }));
  printf("%d rounds of attach and kill: rss %ld KiB after %d, %ld KiB at the end\n", kRounds,
         early.rss_kib, kWarmUp, late.rss_kib);
  EXPECT_LE(late.rss_kib, early.rss_kib + kGrowthKib);
}

// A trainer that is killed inside each call of its own runtime, one after the other.
TEST_F(CudaDeath, InsideEachCallOfItsRuntimeHarmsNobodyElse) {
  for (const std::string function :
       {"cudaMalloc", "cudaIpcGetMemHandle", "cudaMemsetAsync", "cudaMemcpyAsync",
        "cudaEventRecord", "cudaEventSynchronize"}) {
    int killed = 0;
    for (int n = 1;; ++n) {
      const ScopedEnvironment scope(
          Environment{{"DMUON_FAKE_CUDA_FAULTS", function + ":" + std::to_string(n) + "=kill"}});
      ChildProcess helper = Helper("once", {.job = "dying"}, 0);
      const std::string said = helper.ReadAll();
      if (helper.Wait() == 0) break;
      ++killed;
      EXPECT_EQ(helper.Wait(), 128 + SIGKILL) << function << " " << n << ": " << said;
      ASSERT_LT(n, 100) << function;
    }
    printf("%s: killed in %d calls\n", function.c_str(), killed);
    EXPECT_GT(killed, 0) << function;
  }
}

// A trainer whose own runtime fails in each call.
TEST_F(CudaDeath, AFaultInEachCallOfTheTrainersRuntimeIsAClearError) {
  for (const std::string function :
       {"cudaMalloc", "cudaIpcGetMemHandle", "cudaStreamCreateWithFlags",
        "cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventSynchronize"}) {
    int failed = 0;
    for (int n = 1; n < 100; ++n) {
      const ScopedEnvironment scope(Environment{
          {"DMUON_FAKE_CUDA_FAULTS", function + ":" + std::to_string(n) + "=fail(999)"}});
      ChildProcess helper = Helper("once", {.job = "failing"}, 0);
      const std::string said = helper.ReadAll();
      if (helper.Wait() == 0) break;
      ++failed;
      EXPECT_THAT(said, AllOf(HasSubstr("error INTERNAL"), HasSubstr("cudaErrorUnknown")))
          << function << " " << n;
    }
    printf("%s: failed in %d calls\n", function.c_str(), failed);
    EXPECT_GT(failed, 0) << function;
  }
}

TEST(CudaClose, ADriverThatDoesNotCloseHoldsUpNobodyElse) {
  std::unique_ptr<DaemonProcess> daemon;
  {
    const ScopedEnvironment scope(
        Environment{{"DMUON_FAKE_CUDA_FAULTS", "cudaIpcCloseMemHandle:1+=block(3s)"}});
    daemon = std::make_unique<DaemonProcess>(Program("dmuond"),
                                             std::vector<std::string>{"--backend=cuda"});
  }
  auto other = Trainer::Start(daemon->endpoint(), {.job = "other"}, 0);
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE((*other)->Train(1).ok());
  auto leaving = Trainer::Start(daemon->endpoint(), {.job = "leaving"}, 0);
  ASSERT_TRUE(leaving.ok()) << leaving.status();
  const absl::Time begin = absl::Now();
  absl::Status closed;
  absl::Time closed_at;
  std::thread leaves([&] {
    closed = (*leaving)->Close();
    closed_at = absl::Now();
  });
  absl::Duration slowest;
  while (absl::Now() < begin + absl::Seconds(2)) {
    const absl::Time start = absl::Now();
    EXPECT_TRUE((*other)->Train(1).ok());
    slowest = std::max(slowest, absl::Now() - start);
  }
  leaves.join();
  EXPECT_TRUE(closed.ok()) << closed;
  // The answer waits until the memory may be freed; others do not.
  EXPECT_GE(closed_at - begin, absl::Seconds(3));
  printf("slowest step of the other session: %s\n", absl::FormatDuration(slowest).c_str());
  EXPECT_LT(slowest, absl::Seconds(1));
}

}  // namespace
}  // namespace dmuon::testing
