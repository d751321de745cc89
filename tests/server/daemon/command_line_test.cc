#include "server/daemon/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/daemon/config_keys.h"
#include "server/daemon/exit_codes.h"

namespace dmuon::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using Action = CommandLine::Action;

CommandLine Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "dmuond");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
}

TEST(CommandLine, HelpNamesEachKeyAndEachExitCode) {
  const CommandLine line = Parse({"--help"});
  EXPECT_EQ(line.action, Action::kExit);
  EXPECT_EQ(line.exit_code, 0);
  for (const ConfigKey& key : ConfigKeys()) EXPECT_THAT(line.text, HasSubstr(FlagName(key.name)));
  EXPECT_THAT(line.text, HasSubstr(kExitCodes));
  for (const char* flag :
       {"--config", "--print-config", "--check-config", "--calibrate", "--ready-fd", "--version"}) {
    EXPECT_THAT(line.text, HasSubstr(flag));
  }
}

TEST(CommandLine, FlagsBecomeKeysInTheOrderOfTheConfiguration) {
  const CommandLine line = Parse({"--exit-when-idle", "--socket-dir", "/x", "--threads=4",
                                  "--config", "f.yaml", "--allow-uids", "1,2", "--ready-fd", "3"});
  ASSERT_EQ(line.action, Action::kRun) << line.text;
  EXPECT_THAT(line.flags, ElementsAre(Pair("socket_dir", "/x"), Pair("allow_uids", "1,2"),
                                      Pair("threads", "4"), Pair("exit_when_idle", "true")));
  EXPECT_EQ(line.config, "f.yaml");
  EXPECT_EQ(line.ready_fd, 3);
}

TEST(CommandLine, ABooleanCanBeSaidToBeFalse) {
  EXPECT_THAT(Parse({"--exit-when-idle=false"}).flags,
              ElementsAre(Pair("exit_when_idle", "false")));
}

TEST(CommandLine, VersionPrintAndCheckAreActions) {
  EXPECT_EQ(Parse({"--version"}).text, "dmuond " DMUON_VERSION "\n");
  EXPECT_EQ(Parse({"--print-config"}).action, Action::kPrintConfig);
  EXPECT_EQ(Parse({"--check-config"}).action, Action::kCheckConfig);
  EXPECT_EQ(Parse({"--calibrate"}).action, Action::kCalibrate);
}

TEST(CommandLine, AWrongOneIsUsageWithAHint) {
  const CommandLine line = Parse({"--thread=4"});
  EXPECT_EQ(line.action, Action::kExit);
  EXPECT_EQ(line.exit_code, static_cast<int>(ExitCode::kUsage));
  EXPECT_THAT(line.text, HasSubstr("Did you mean --threads"));
  EXPECT_EQ(Parse({"positional"}).exit_code, static_cast<int>(ExitCode::kUsage));
  EXPECT_EQ(Parse({"--threads"}).exit_code, static_cast<int>(ExitCode::kUsage));
  EXPECT_EQ(Parse({"--ready-fd", "x"}).exit_code, static_cast<int>(ExitCode::kUsage));
  EXPECT_EQ(Parse({"--calibrate", "--check-config"}).exit_code, static_cast<int>(ExitCode::kUsage));
  EXPECT_EQ(Parse({"--print-config", "--check-config"}).exit_code,
            static_cast<int>(ExitCode::kUsage));
}

TEST(CommandLine, AnEmptyPathOfTheConfigurationIsNotNone) {
  for (const CommandLine& line : {Parse({"--config", ""}), Parse({"--config="})}) {
    EXPECT_EQ(line.exit_code, static_cast<int>(ExitCode::kUsage));
    EXPECT_THAT(line.text, HasSubstr("--config"));
  }
}

TEST(CommandLine, ADescriptorOutOfRangeIsToldTheRange) {
  for (const char* fd : {"-1", "1048576", "99999999999"}) {
    const CommandLine line = Parse({"--ready-fd", fd});
    EXPECT_EQ(line.exit_code, static_cast<int>(ExitCode::kUsage)) << fd;
    EXPECT_LT(line.text.size(), 200u) << line.text;
  }
  EXPECT_THAT(Parse({"--ready-fd", "-1"}).text, HasSubstr("1048575"));
}

}  // namespace
}  // namespace dmuon::server
