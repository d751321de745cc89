#include "client/ctl/exit_code.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_format.h"

namespace dmuon::ctl {
namespace {

TEST(ExitCode, EachStatusHasItsDocumentedCode) {
  EXPECT_EQ(ToExitCode(absl::OkStatus()), 0);
  EXPECT_EQ(ToExitCode(absl::InternalError("")), 1);
  EXPECT_EQ(ToExitCode(absl::UnavailableError("")), 2);
  EXPECT_EQ(ToExitCode(absl::InvalidArgumentError("")), 3);
  EXPECT_EQ(ToExitCode(absl::FailedPreconditionError("")), 4);
  EXPECT_EQ(ToExitCode(absl::PermissionDeniedError("")), 7);
  EXPECT_EQ(ToExitCode(absl::NotFoundError("")), 8);
  EXPECT_EQ(ToExitCode(absl::DeadlineExceededError("")), 9);
  EXPECT_EQ(ToExitCode(absl::CancelledError("")), 130);
}

TEST(ExitCode, HelpNamesEachCode) {
  for (int code : {kOk, kFailed, kUnreachable, kInvalidInput, kPrecondition, kDenied, kNotFound,
                   kTimedOut, kUsage, kInterrupted}) {
    EXPECT_THAT(kExitCodeHelp, ::testing::HasSubstr(absl::StrFormat("  %-5d", code)));
  }
}

}  // namespace
}  // namespace dmuon::ctl
