// The calibration file, and the way from a measurement through it to the costs that a daemon goes by.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/daemon/calibrate.h"
#include "server/daemon/calibration_file.h"
#include "tests/support/process.h"

namespace dmuon::server {
namespace {

namespace fs = std::filesystem;
using dmuon::testing::TemporaryDirectory;
using ::testing::HasSubstr;

class CalibrationTest : public ::testing::Test {
 protected:
  std::string file() const { return directory_.path() + "/cache/calibration.json"; }
  static CalibratedMachine Machine() {
    return {"cpu", "Some Processor 9000", "gram fp32 (avx2)", 4};
  }
  static Calibration Some() {
    return {Machine(),
            absl::FromUnixSeconds(1700000000),
            {{{{std::nullopt, Dtype::kF32}, {64, 128}, {1}, {{1e9, 2e9}, {3e9, 4e9}}}}, 1e10}};
  }
  std::string Text() const {
    std::ifstream in(file());
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void Put(const std::string& text) const {
    std::ofstream(file(), std::ios::trunc | std::ios::binary) << text;
  }
  absl::Status Write(const Calibration& calibration) const {
    absl::StatusOr<ReplacedFile> place = OpenCalibration(file());
    return place.ok() ? WriteCalibration(*place, calibration) : place.status();
  }
  absl::Status StatusOfReading() const { return ReadCalibration(file(), Machine()).status(); }
  void ExpectOneShortLine(const absl::Status& status) const {
    const absl::string_view message = status.message();
    EXPECT_LT(message.size(), file().size() + 400) << message;
    for (char c : message) EXPECT_TRUE(absl::ascii_isprint(c)) << message;
  }

  TemporaryDirectory directory_;
};

TEST_F(CalibrationTest, ComesBackAsItWasWritten) {
  ASSERT_EQ(Write(Some()), absl::OkStatus());
  const auto read = ReadCalibration(file(), Machine());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->measured, Some().measured);
  ASSERT_EQ(read->costs.series.size(), 1u);
  EXPECT_EQ(read->costs.series[0].rates[1].gram, 4e9);
  EXPECT_EQ(read->costs.bytes_per_second, 1e10);
}

TEST_F(CalibrationTest, OfAnotherMachineKernelThreadsOrVersionIsRefusedWithBoth) {
  ASSERT_EQ(Write(Some()), absl::OkStatus());
  const auto refused = [&](auto change, const char* expected) {
    CalibratedMachine machine = Machine();
    change(machine);
    const absl::Status status = ReadCalibration(file(), machine).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr(expected));
  };
  refused([](auto& m) { m.backend = "cuda"; }, "backend: expected 'cuda', given 'cpu'");
  refused([](auto& m) { m.device = "Other"; }, "expected 'Other', given 'Some Processor 9000'");
  refused([](auto& m) { m.kernel = "portable"; }, "expected 'portable', given 'gram fp32 (avx2)'");
  refused([](auto& m) { m.threads = 2; }, "number of threads: expected '2', given '4'");
  Put(absl::StrReplaceAll(Text(), {{"\"version\": 1,", "\"version\": 2, \"later_field\": [7],"}}));
  EXPECT_EQ(StatusOfReading().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(StatusOfReading().message()), HasSubstr("version: expected '1', given"));
}

TEST_F(CalibrationTest, ThatIsNotThereIsNotFound) {
  EXPECT_EQ(StatusOfReading().code(), absl::StatusCode::kNotFound);
}

TEST_F(CalibrationTest, CutShortAnywhereIsRefusedAndCrashesNothing) {
  ASSERT_EQ(Write(Some()), absl::OkStatus());
  const std::string whole = Text();
  for (size_t length = 0; length + 2 < whole.size(); ++length) {
    Put(whole.substr(0, length));
    ASSERT_FALSE(StatusOfReading().ok()) << length << " of " << whole.size() << " bytes";
  }
}

TEST_F(CalibrationTest, ThatIsSomethingElseIsRefusedAndHoldsNothingUp) {
  fs::create_directory(directory_.path() + "/cache");
  const std::string others[] = {std::string("\x7f"
                                            "ELF\0\0\xff\xfe",
                                            8),
                                "threads: 1\n",
                                "{\"version\": 1,\n \"backend\": \"\x1b[31m\", \n}",
                                "{\"version\": \"\xe9\xe9\"}",
                                std::string(100000, '['),
                                "[]",
                                "null",
                                std::string(1 << 20, ' ')};
  for (const std::string& other : others) {
    Put(other);
    EXPECT_FALSE(StatusOfReading().ok()) << other.substr(0, 20);
    ExpectOneShortLine(StatusOfReading());
  }
  Put(std::string(1 << 20, ' '));
  EXPECT_THAT(std::string(StatusOfReading().message()), HasSubstr("size: expected at most"));
  fs::remove(file());
  ASSERT_EQ(mkfifo(file().c_str(), 0600), 0);
  EXPECT_THAT(std::string(StatusOfReading().message()), HasSubstr("not a regular file"));
  fs::remove(file());
  fs::create_directory(file());
  EXPECT_FALSE(StatusOfReading().ok());
}

TEST_F(CalibrationTest, WhatItSaysOfItsMachineIsShownEscapedAndCut) {
  Calibration other = Some();
  other.machine.device = "\x1b[31m\n" + std::string(1000, 'x');
  ASSERT_EQ(Write(other), absl::OkStatus());
  EXPECT_EQ(StatusOfReading().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(StatusOfReading().message()), HasSubstr("given '\\x1b[31m\\nxxx"));
  ExpectOneShortLine(StatusOfReading());
}

TEST_F(CalibrationTest, ThatCannotBeWrittenIsRefusedBeforeAnythingIsMeasured) {
  config::v1::Config config;
  config.set_backend("no such backend");  // what would measure
  fs::create_directories(file());
  config.set_calibration_file(file());
  EXPECT_THAT(std::string(RunCalibration(config, /*signals=*/-1).message()),
              HasSubstr(file() + ": expected a regular file or nothing, given a directory"));
}

TEST_F(CalibrationTest, RatesThatNobodyMeasuredAreRefused) {
  ASSERT_EQ(Write(Some()), absl::OkStatus());
  const std::string whole = Text();
  for (const char* rate : {"0", "-3e9", "1e300", "\"NaN\"", "\"Infinity\""}) {
    Put(absl::StrReplaceAll(whole, {{"4000000000", rate}}));
    EXPECT_EQ(StatusOfReading().code(), absl::StatusCode::kInvalidArgument) << rate;
  }
}

TEST_F(CalibrationTest, IsMeasuredWrittenAndTakenByTheSameMachineAlone) {
  config::v1::Config config;
  config.set_backend("cpu");
  config.set_threads(1);
  config.set_calibration_file(file());
  kernels::CalibrationPlan plan;
  plan.sides = {16, 64};
  plan.aspects = {1, 2};
  plan.each = absl::ZeroDuration();
  const UniqueFd signals(eventfd(0, EFD_NONBLOCK));
  ASSERT_EQ(RunCalibration(config, signals.get(), plan), absl::OkStatus());

  const auto backend = kernels::CreateCpuBackend({.threads = 1});
  ASSERT_TRUE(backend.ok());
  const CostSource costs = LoadCosts(file(), **backend, 1);
  ASSERT_NE(costs.table, nullptr) << costs.text;
  EXPECT_TRUE(absl::StartsWith(costs.text, "measured: ")) << costs.text;
  EXPECT_EQ(costs.table->series[0].sides, plan.sides);

  const CostSource others = LoadCosts(file(), **backend, 2);
  EXPECT_EQ(others.table, nullptr);
  EXPECT_TRUE(others.refused);
  EXPECT_THAT(others.text, HasSubstr("another number of threads"));
}

TEST_F(CalibrationTest, TheTableNamesShapesTimesAndTheFormThatRuns) {
  const auto costs = std::make_shared<const kernels::CostTable>(
      kernels::CostTable{{{{std::nullopt}, {64}, {1, 4}, {{4e9, 1e9}, {1e9, 4e9}}}}, 2.5e10});
  const std::string text = CalibrationText(
      {{std::nullopt, 64, 64, 0.001, 0.002}, {std::nullopt, 64, 256, 0.004, 0.0015}}, costs);
  EXPECT_THAT(text, ::testing::ContainsRegex("default +64 x 64 +1.000 +2.000 +direct\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("default +64 x 256 +4.000 +1.500 +gram\n"));
  EXPECT_THAT(text, HasSubstr("25.0 GB/s"));
}

}  // namespace
}  // namespace dmuon::server
