#include "base/status_macros.h"

#include <gtest/gtest.h>

#include <memory>

namespace dmuon {
namespace {

absl::Status PassOn(const absl::Status& status, bool* reached) {
  RETURN_IF_ERROR(status);
  *reached = true;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<int>> Make(bool ok) {
  if (!ok) return absl::NotFoundError("no int");
  return std::make_unique<int>(7);
}

absl::StatusOr<int> Twice(bool first_ok, bool second_ok) {
  ASSIGN_OR_RETURN(std::unique_ptr<int> a, Make(first_ok));
  ASSIGN_OR_RETURN(auto b, Make(second_ok));
  return *a + *b;
}

TEST(StatusMacros, ReturnIfErrorStopsAtTheError) {
  bool reached = false;
  EXPECT_EQ(PassOn(absl::AbortedError("x"), &reached), absl::AbortedError("x"));
  EXPECT_FALSE(reached);
  EXPECT_TRUE(PassOn(absl::OkStatus(), &reached).ok());
  EXPECT_TRUE(reached);
}

TEST(StatusMacros, AssignOrReturnMovesTheValueOrPassesTheErrorOn) {
  EXPECT_EQ(*Twice(true, true), 14);
  EXPECT_EQ(Twice(true, false).status(), absl::NotFoundError("no int"));
  EXPECT_EQ(Twice(false, true).status(), absl::NotFoundError("no int"));
}

TEST(StatusMacros, AnnotateKeepsTheCodeAndPutsTheContextFirst) {
  const absl::Status status =
      Annotate(absl::InvalidArgumentError("expected 2, given 3"), "registering 'w'");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "registering 'w': expected 2, given 3");
  EXPECT_TRUE(Annotate(absl::OkStatus(), "registering 'w'").ok());
}

}  // namespace
}  // namespace dmuon
