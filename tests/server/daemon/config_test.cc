#include "server/daemon/config.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/daemon/config_file.h"
#include "server/daemon/config_keys.h"
#include "server/daemon/config_value.h"

namespace dmuon::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ConfigTest : public ::testing::Test {
 protected:
  ~ConfigTest() override {
    for (const std::string& path : files_) unlink(path.c_str());
  }
  std::string File(const std::string& text) {
    std::string path = "/tmp/dmuon-config-XXXXXX";
    close(mkstemp(path.data()));
    std::ofstream(path) << text;
    files_.push_back(path);
    return path;
  }
  absl::StatusOr<LoadedConfig> LoadFile(const std::string& text) {
    return LoadConfig({.file = File(text)});
  }
  // The error without the name of the temporary file.
  std::string ErrorOf(const std::string& text) {
    const absl::Status status = LoadFile(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const std::string message(status.message());
    const std::string& name = files_.back();
    EXPECT_EQ(message.substr(0, name.size()), name) << message;
    return message.substr(std::min(name.size(), message.size()));
  }

 private:
  std::vector<std::string> files_;
};

TEST_F(ConfigTest, EachFieldOfTheMessageIsAKeyWithDefaultAndHelp) {
  const auto* type = config::v1::Config::descriptor();
  std::vector<std::string> fields, keys;
  for (int i = 0; i < type->field_count(); ++i) fields.push_back(type->field(i)->name());
  for (const ConfigKey& key : ConfigKeys()) {
    keys.emplace_back(key.name);
    EXPECT_FALSE(key.help.empty()) << key.name;
  }
  EXPECT_EQ(fields, keys);
}

TEST_F(ConfigTest, TheDocumentedFileHasEachKeyWithItsDefault) {
  const std::string path = DMUON_SOURCE_DIR "/deploy/dmuond.yaml";
  const auto settings = ReadConfigFile(path);
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->size(), ConfigKeys().size());
  const auto with_file = LoadConfig({.file = path}), without = LoadConfig({});
  ASSERT_TRUE(with_file.ok() && without.ok()) << with_file.status() << without.status();
  for (const ConfigKey& key : ConfigKeys()) {
    EXPECT_EQ(ValueText(with_file->config, key.name), ValueText(without->config, key.name))
        << key.name;
    EXPECT_THAT(with_file->origin.at(std::string(key.name)), HasSubstr("dmuond.yaml:")) << key.name;
  }
}

TEST_F(ConfigTest, AFlagWinsOverTheEnvironmentThatOverTheFileThatOverTheDefault) {
  ConfigSources sources;
  sources.file = File("# first line\nthreads: 1\nmax_sessions: 2\nlog_level: debug\n");
  sources.environment = {
      {"DMUOND_MAX_SESSIONS", "3"}, {"DMUOND_LOG_LEVEL", "warning"}, {"HOME", "/"}};
  sources.flags = {{"log_level", "error"}};
  const auto loaded = LoadConfig(sources);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.threads(), 1u);
  EXPECT_EQ(loaded->config.max_sessions(), 3u);
  EXPECT_EQ(loaded->config.log_level(), "error");
  EXPECT_EQ(loaded->config.backend(), "auto");
  EXPECT_EQ(loaded->origin.at("threads"), sources.file + ":2");
  EXPECT_EQ(loaded->origin.at("max_sessions"), "env DMUOND_MAX_SESSIONS");
  EXPECT_EQ(loaded->origin.at("log_level"), "flag");
  EXPECT_EQ(loaded->origin.at("backend"), "default");
}

TEST_F(ConfigTest, WhatIsPrintedShowsOriginsAndCanBeReadAgain) {
  const auto loaded =
      LoadFile("allow_uids: [1000, 1001]\nsocket_dir: '/tmp/a b'\nexit_when_idle: true\n");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const std::string printed = PrintConfig(*loaded);
  EXPECT_THAT(printed, HasSubstr("allow_uids: [1000, 1001]"));
  EXPECT_THAT(printed, HasSubstr(":1\n"));
  EXPECT_THAT(printed, HasSubstr("# default\n"));
  const auto again = LoadFile(printed);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->config.SerializeAsString(), loaded->config.SerializeAsString());
}

TEST_F(ConfigTest, AnUnknownKeyIsNamedWithItsLineAndTheNearest) {
  EXPECT_EQ(ErrorOf("threads: 1\n\nmax_sesions: 4\n"),
            ":3: unknown key 'max_sesions' (did you mean 'max_sessions'?)");
  EXPECT_EQ(ErrorOf("socket-dir: /x\n"),
            ":1: unknown key 'socket-dir' (did you mean 'socket_dir'?)");
  EXPECT_EQ(ErrorOf("zzzzzzzz: 1\n"), ":1: unknown key 'zzzzzzzz'");
  EXPECT_EQ(ErrorOf("'': 1\n"), ":1: unknown key ''");
}

TEST_F(ConfigTest, AValueOfAnotherTypeNamesKeyExpectedAndGiven) {
  EXPECT_EQ(ErrorOf("threads: four\n"),
            ":1: threads: expected an unsigned integer of 32 bits, given 'four'");
  EXPECT_EQ(ErrorOf("threads: -1\n"),
            ":1: threads: expected an unsigned integer of 32 bits, given '-1'");
  EXPECT_EQ(ErrorOf("threads: 4294967296\n"),
            ":1: threads: expected an unsigned integer of 32 bits, given '4294967296'");
  EXPECT_EQ(ErrorOf("threads: '4'\n"),
            ":1: threads: expected an unsigned integer of 32 bits, given the string '4'");
  EXPECT_EQ(ErrorOf("threads: [4]\n"),
            ":1: threads: expected an unsigned integer of 32 bits, given a list");
  EXPECT_EQ(ErrorOf("exit_when_idle: yes\n"),
            ":1: exit_when_idle: expected true or false, given 'yes'");
  EXPECT_EQ(ErrorOf("step_timeout_seconds: nan\n"),
            ":1: step_timeout_seconds: expected a number, given 'nan'");
  EXPECT_EQ(ErrorOf("allow_uids: 7\n"),
            ":1: allow_uids: expected a list, each an unsigned integer of 32 bits, given '7'");
  EXPECT_EQ(ErrorOf("allow_uids: [7, x]\n"),
            ":1: allow_uids: expected a list, each an unsigned integer of 32 bits, given 'x'");
  EXPECT_EQ(ErrorOf("listen: {a: b}\n"), ":1: listen: expected a value, given a mapping");
  EXPECT_EQ(ErrorOf("threads:\n"), ":1: threads: expected a value, given nothing");
}

TEST_F(ConfigTest, WhatWasGivenIsShownEscaped) {
  EXPECT_EQ(ErrorOf("\"a\\e[31m\": 1\n"), ":1: unknown key 'a\\x1b[31m'");
  EXPECT_EQ(ErrorOf("\"a\\e\": 1\n\"a\\e\": 1\n"), ":2: key 'a\\x1b' comes twice");
  EXPECT_EQ(ErrorOf("threads: \"\\e4\"\n"),
            ":1: threads: expected an unsigned integer of 32 bits, given the string '\\x1b\\x34'");
  EXPECT_EQ(ErrorOf("\"\\e\":\n"), ":1: \\x1b: expected a value, given nothing");
  EXPECT_THAT(ErrorOf(std::string(1000, 'k') + ": 1\n"), HasSubstr(std::string(200, 'k') + "...'"));
}

TEST_F(ConfigTest, APathWithControlCharactersOrWithoutUtf8IsRefused) {
  for (const char* key : {"socket_dir", "calibration_file"}) {
    const std::string expected = absl::StrCat(key, ": expected UTF-8 without control characters");
    for (const char* path : {"/tmp/a\\0b", "/tmp/a\\nb", "/tmp/\\e", "/tmp/\\x7f"})
      EXPECT_THAT(ErrorOf(absl::StrCat(key, ": \"", path, "\"\n")), HasSubstr(expected)) << path;
    const absl::Status status = LoadConfig({.flags = {{key, "/tmp/\xff"}}}).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(expected));
    EXPECT_TRUE(LoadFile(absl::StrCat(key, ": '/tmp/\u00e4 b'\n")).ok());
  }
}

TEST_F(ConfigTest, AValueOutOfRangeNamesKeyExpectedAndGiven) {
  EXPECT_EQ(ErrorOf("calibration_file: here.json\n"),
            ":1: calibration_file: expected an absolute path, or nothing, given here.json");
  EXPECT_EQ(ErrorOf("socket_dir: run\n"), ":1: socket_dir: expected an absolute path, given run");
  EXPECT_TRUE(LoadFile("socket_dir: /" + std::string(93, 'd') + "\n").ok());
  EXPECT_THAT(ErrorOf("socket_dir: /" + std::string(94, 'd') + "\n"),
              HasSubstr("socket_dir: expected at most 94 bytes, given /ddd"));
  for (const char* mode : {"0777", "0650", "rwx", "0958", "17500", "''"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("socket_mode: ", mode, "\n")),
                HasSubstr("socket_mode: expected an octal mode"))
        << mode;
  }
  EXPECT_THAT(ErrorOf("backend: gpu\n"),
              HasSubstr("backend: expected auto or cpu or cuda, given gpu"));
  EXPECT_THAT(ErrorOf("max_sessions: 0\n"),
              HasSubstr("max_sessions: expected 1 to 65536, given 0"));
  EXPECT_THAT(ErrorOf("step_timeout_seconds: 0\n"),
              HasSubstr("step_timeout_seconds: expected seconds > 0"));
  EXPECT_THAT(ErrorOf("log_level: loud\n"),
              HasSubstr("log_level: expected debug or info or warning or error"));
  EXPECT_THAT(ErrorOf("log_format: xml\n"), HasSubstr("log_format: expected text or json"));
}

TEST_F(ConfigTest, WhatIsRefusedForNowSaysSoWithItsKey) {
  const auto refusal = [&](const std::string& key, const std::string& value) {
    const absl::Status status = LoadConfig({.flags = {{key, value}}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(FlagName(key), ": ", key, ": ")));
    EXPECT_THAT(std::string(status.message()), HasSubstr("not built yet"));
  };
  refusal("listen", "0.0.0.0:50051");
  refusal("orphan_ttl_seconds", "30");
}

TEST_F(ConfigTest, AFileThatIsNoMappingOfKeysToValuesIsRefusedWithItsLine) {
  EXPECT_THAT(ErrorOf("- a\n- b\n"), HasSubstr(":1: expected a mapping"));
  EXPECT_THAT(ErrorOf("threads: 1\nthreads: 2\n"), HasSubstr(":2: key 'threads' comes twice"));
  EXPECT_THAT(ErrorOf("threads: 1\n---\nthreads: 2\n"), HasSubstr("one document"));
  EXPECT_THAT(ErrorOf("threads: [1\n"), HasSubstr(":"));
  EXPECT_THAT(ErrorOf("allow_uids: [[1]]\n"),
              HasSubstr("allow_uids: expected a list of plain values"));
  EXPECT_THAT(ErrorOf(std::string(70000, '#')), HasSubstr("65536 bytes"));
  EXPECT_THAT(ErrorOf("threads: " + std::string(30000, '[')), HasSubstr("nested too deep"));
  std::string dashes;
  for (int i = 0; i < 20000; ++i) dashes += "- ";
  EXPECT_THAT(ErrorOf(dashes + "x\n"), HasSubstr("nested too deep"));
  EXPECT_TRUE(LoadFile("").ok());
  EXPECT_TRUE(LoadFile("# only a comment\n").ok());
  EXPECT_EQ(LoadConfig({.file = "/nonexistent.yaml"}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ConfigTest, ListsComeFromEnvironmentAndFlagsByCommas) {
  const auto loaded =
      LoadConfig({.environment = {{"DMUOND_ALLOW_UIDS", "1,2"}, {"DMUOND_ADMIN_UIDS", ""}}});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(loaded->config.allow_uids(), ElementsAre(1, 2));
  EXPECT_THAT(loaded->config.admin_uids(), IsEmpty());
  const absl::Status status = LoadConfig({.environment = {{"DMUOND_ALLOW_UIDS", "1,,2"}}}).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("env DMUOND_ALLOW_UIDS: allow_uids: expected a list"));
}

TEST_F(ConfigTest, ASlipInTheEnvironmentIsAWarningAndWhatKubernetesPutsThereIsNone) {
  const auto loaded = LoadConfig({.environment = {{"DMUOND_THREDS", "4"},
                                                  {"DMUOND_SERVICE_HOST", "10.0.0.1"},
                                                  {"DMUOND_PORT", "tcp://10.0.0.1:80"},
                                                  {"DMUOND_PORT_80_TCP_ADDR", "10.0.0.1"}}});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_THAT(loaded->warnings,
              ElementsAre(AllOf(HasSubstr("DMUOND_THREDS"), HasSubstr("'threads'"))));
}

TEST(NearestName, IsTheNearestWithinReach) {
  const std::vector<std::string> names = {"threads", "listen", "backend"};
  EXPECT_EQ(NearestName("thread", names), "threads");
  EXPECT_EQ(NearestName("backedn", names), "backend");
  EXPECT_EQ(NearestName("quantum", names), "");
}

}  // namespace
}  // namespace dmuon::server
