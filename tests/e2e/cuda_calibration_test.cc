// `dmuond --calibrate` on a GPU, and a daemon that goes by what it found. On the stand-ins for CUDA.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "server/daemon/calibrate.h"
#include "server/daemon/config.h"
#include "tests/cuda/device.h"
#include "tests/support/daemon_process.h"
#include "tests/support/environment.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

std::string TextOf(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

class CudaCalibration : public ::testing::Test {
 protected:
  std::string At(const std::string& name) const { return directory_.path() + "/" + name; }
  // `dmuond --calibrate` as a process: its exit code, and what it wrote to stderr.
  std::pair<int, std::string> Calibrate(const std::string& file, const Environment& environment) {
    const ScopedEnvironment scope(environment);
    ChildProcess process({Program("dmuond"), "--calibrate", "--backend=cuda", "--threads=1",
                          "--calibration-file", file},
                         {.stderr_path = At("log")});
    const int code = process.Wait();
    return {code, TextOf(At("log"))};
  }
  // The files of a folder that is for a calibration alone.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(At("cache")))
      names.push_back(entry.path().filename());
    return names;
  }
  void SetUp() override { fs::create_directory(At("cache")); }

 private:
  TemporaryDirectory directory_;
};

TEST_F(CudaCalibration, IsMeasuredOnceAndADaemonThatReadsItMeasuresNothing) {
  const std::string file = At("cache/calibration.json");
  auto loaded = server::LoadConfig(
      {.flags = {{"backend", "cuda"}, {"threads", "1"}, {"calibration_file", file}}});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const UniqueFd signals(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  kernels::CalibrationPlan plan;
  plan.sides = {32, 64};
  plan.aspects = {1, 4};
  ASSERT_EQ(server::RunCalibration(loaded->config, signals.get(), plan), absl::OkStatus());
  const auto counters = cuda::Fake<FakeCudaCounters()>("fake_cuda_counters");
  ASSERT_NE(counters, nullptr);
  EXPECT_GT(counters().launches, 0u);
  EXPECT_EQ(counters().live_bytes + counters().streams + counters().events, 0u) << "it leaks";

  std::string log, report;
  {
    const ScopedEnvironment scope({{"DMUON_FAKE_CUDA_REPORT", At("report")}});
    DaemonProcess daemon(Program("dmuond"),
                         {"--backend=cuda", "--threads=1", "--calibration-file", file});
    report = At("report." + std::to_string(daemon.pid()));
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.Wait(), 0);
    log = daemon.Log();
  }
  EXPECT_THAT(log, HasSubstr("costs by=\"measured: " + file));
  EXPECT_THAT(TextOf(report), HasSubstr("\"launches\": 0,"));
}

TEST_F(CudaCalibration, AFileThatCannotBeWrittenIsRefusedBeforeAnythingIsMeasured) {
  const Environment reported = {{"DMUON_FAKE_CUDA_REPORT", At("report")}};
  fs::create_directory(At("cache/directory"));
  for (const std::string& file : {std::string("/proc/no/such/place"), At("cache/directory")}) {
    const auto [code, log] = Calibrate(file, reported);
    EXPECT_EQ(code, 1);
    EXPECT_THAT(log, HasSubstr(file));
  }
  EXPECT_EQ(Names(), std::vector<std::string>{"directory"});
  for (const auto& entry : fs::directory_iterator(fs::path(At("report")).parent_path()))
    EXPECT_NE(entry.path().stem(), "report") << "CUDA was used";
}

TEST_F(CudaCalibration, ADeviceThatIsNotThereOrFailsIsSaidAndNothingIsLeft) {
  const std::string file = At("cache/calibration.json");
  struct Case {
    Environment environment;
    const char* text;
  };
  for (const Case& c :
       {Case{{{"DMUON_FAKE_CUDA_DEVICES", "0"}}, "cudaErrorNoDevice"},
        Case{{{"DMUON_FAKE_CUDA_COMPUTE_MODE", "prohibited"}}, "is in compute mode prohibited"},
        Case{{{"DMUON_FAKE_CUDA_FAULTS", "execute:100+=fail(700)"}}, "cudaErrorIllegalAddress"}}) {
    const auto [code, log] = Calibrate(file, c.environment);
    EXPECT_EQ(code, 1);
    EXPECT_THAT(log, AllOf(HasSubstr("dmuond: "), HasSubstr(c.text)));
    EXPECT_THAT(Names(), IsEmpty());
  }
}

}  // namespace
}  // namespace dmuon::testing
