#include "base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace dmuon {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

class LogTest : public ::testing::Test {
 protected:
  ~LogTest() override {
    SetLogLevel(LogLevel::kInfo);
    SetLogFormat(LogFormat::kText);
  }
  static std::string Written(LogLevel level, const std::vector<LogField>& fields) {
    ::testing::internal::CaptureStderr();
    Log(level, "session_ready", fields);
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, TextIsOneLineOfTimeLevelEventAndFields) {
  EXPECT_THAT(
      Written(LogLevel::kInfo, {{"job", "run-7"}, {"ranks", 2}}),
      MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z info session_ready job=run-7 ranks=2\n"));
}

TEST_F(LogTest, AValueCannotForgeASecondLineOrField) {
  const std::string line =
      Written(LogLevel::kInfo, {{"job", "a\nb"}, {"path", "x y=\"z\""}, {"none", ""}});
  EXPECT_THAT(line, HasSubstr("job=\"a\\u000ab\" path=\"x y=\\\"z\\\"\" none=\"\"\n"));
}

TEST_F(LogTest, JsonEscapesQuotesBackslashesAndControlBytes) {
  SetLogFormat(LogFormat::kJson);
  EXPECT_THAT(Written(LogLevel::kError, {{"reason", "a\"b\\c\n"}}),
              EndsWith(R"("level":"error","event":"session_ready","reason":"a\"b\\c\u000a"})"
                       "\n"));
}

TEST_F(LogTest, NothingIsWrittenBelowTheMinimum) {
  SetLogLevel(LogLevel::kWarning);
  EXPECT_EQ(Written(LogLevel::kInfo, {}), "");
  EXPECT_NE(Written(LogLevel::kWarning, {}), "");
}

}  // namespace
}  // namespace dmuon
