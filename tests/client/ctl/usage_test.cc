#include "client/ctl/usage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace dmuon::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Usage, AWholeNumberIsNeitherNegativeNorTooLargeNorAWord) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  for (const char* good : {"0", "7", "18446744073709551615"})
    EXPECT_EQ(CheckWhole(good, kMost), "");
  for (const char* bad : {"-1", "18446744073709551616", "1.5", "last", ""}) {
    EXPECT_EQ(
        CheckWhole(bad, kMost),
        std::string("expected a whole number from 0 to 18446744073709551615, got '") + bad + "'");
  }
  EXPECT_EQ(CheckWhole("20", 20), "");
  EXPECT_THAT(CheckWhole("21", 20), HasSubstr("0 to 20"));
}

TEST(Usage, ATimeoutIsFiniteAndLongEnoughToBeOne) {
  for (const char* good : {"0.001", "10", "86400", "1e3"}) EXPECT_EQ(CheckTimeout(good), "");
  for (const char* bad : {"0", "-1", "nan", "inf", "86401", "1e400", "soon", ""}) {
    EXPECT_EQ(CheckTimeout(bad), std::string("expected 0.001 to 86400 seconds, got '") + bad + "'");
  }
}

TEST(Usage, AnUnknownVerbIsNamedWithTheNearestAndAll) {
  const std::vector<std::string> verbs = {"status", "sessions", "session", "step", "drain"};
  const std::string near = UnknownVerb("statuss", verbs);
  EXPECT_THAT(near, HasSubstr("no such command: 'statuss'; did you mean 'status'?"));
  EXPECT_THAT(near, HasSubstr("Commands: status, sessions, session, step, drain"));
  EXPECT_THAT(UnknownVerb("drian", verbs), HasSubstr("did you mean 'drain'?"));
  EXPECT_THAT(UnknownVerb("kubernetes", verbs), Not(HasSubstr("did you mean")));
}

}  // namespace
}  // namespace dmuon::ctl
