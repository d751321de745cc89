#include "server/attach/attachments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/escaping.h"

namespace dmuon::server {
namespace {

using ::testing::HasSubstr;

std::string Hex(const Token& token) {
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(token.data()), token.size()));
}

TEST(Attachments, ATokenNamesItsTrainerUntilTheAttachmentEnds) {
  Attachments attachments;
  const auto added = attachments.Add(/*uid=*/1000, /*pid=*/42);
  ASSERT_TRUE(added.ok());
  const auto trainer = attachments.BeginCall(Hex(added->token));
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  EXPECT_EQ(trainer->uid, 1000u);
  EXPECT_EQ(trainer->pid, 42);
  EXPECT_EQ(trainer->attachment, added->trainer.attachment);
  EXPECT_TRUE(attachments.EndCall(added->trainer.attachment));
  EXPECT_TRUE(attachments.Remove(added->trainer.attachment));
  EXPECT_EQ(attachments.BeginCall(Hex(added->token)).status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_FALSE(attachments.Remove(added->trainer.attachment));
}

TEST(Attachments, ATokenThatIsStaleUnknownMissingOrMalformedIsUnauthenticatedAndSaysWhich) {
  Attachments attachments;
  ASSERT_TRUE(attachments.Add(0, 1).ok());
  const auto said = [&](absl::string_view token) {
    const absl::Status status = attachments.BeginCall(token).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
    return std::string(status.message());
  };
  EXPECT_THAT(said(""), HasSubstr("attach to the daemon first"));
  EXPECT_THAT(said("abc"), HasSubstr("32 hex digits"));
  EXPECT_THAT(said(std::string(32, 'g')), HasSubstr("32 hex digits"));
  EXPECT_THAT(said(std::string(64, '0')), HasSubstr("32 hex digits"));
  EXPECT_THAT(said(std::string(32, '0')), HasSubstr("stale or unknown"));
}

TEST(Attachments, AProcessThatAttachesTwiceHasTwoAttachmentsAndTwoTokens) {
  Attachments attachments;
  const auto a = attachments.Add(0, 7), b = attachments.Add(0, 7);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(a->trainer.attachment, b->trainer.attachment);
  EXPECT_NE(a->token, b->token);
  EXPECT_EQ(attachments.size(), 2);
}

TEST(Attachments, TheLimitsOfDaemonAndProcessAreNamed) {
  Attachments attachments({.attachments = 3, .per_process = 2});
  ASSERT_TRUE(attachments.Add(0, 7).ok() && attachments.Add(0, 7).ok());
  const absl::Status process = attachments.Add(0, 7).status();
  EXPECT_EQ(process.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(process.message()), HasSubstr("one process: at most 2"));
  ASSERT_TRUE(attachments.Add(0, 8).ok());
  const absl::Status daemon = attachments.Add(0, 9).status();
  EXPECT_EQ(daemon.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(daemon.message()), HasSubstr("at most 3"));
}

TEST(Attachments, OneTrainerCannotHoldMoreThreadsThanItsCalls) {
  Attachments attachments({.calls_per_attachment = 2});
  const auto added = attachments.Add(0, 7);
  ASSERT_TRUE(added.ok());
  const std::string token = Hex(added->token);
  ASSERT_TRUE(attachments.BeginCall(token).ok() && attachments.BeginCall(token).ok());
  EXPECT_EQ(attachments.BeginCall(token).status().code(), absl::StatusCode::kResourceExhausted);
  attachments.EndCall(added->trainer.attachment);
  EXPECT_TRUE(attachments.BeginCall(token).ok());
}

TEST(Attachments, ACallThatOutlivesItsTrainerIsToldAtItsEndAndListedUntilThen) {
  Attachments attachments;
  const auto added = attachments.Add(0, 7);
  ASSERT_TRUE(added.ok());
  const AttachmentId id = added->trainer.attachment;
  ASSERT_TRUE(attachments.BeginCall(Hex(added->token)).ok() &&
              attachments.BeginCall(Hex(added->token)).ok());
  EXPECT_THAT(attachments.RemovedWithCalls(), ::testing::IsEmpty());
  EXPECT_TRUE(attachments.Remove(id));
  EXPECT_EQ(attachments.size(), 0);
  EXPECT_EQ(attachments.BeginCall(Hex(added->token)).status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(attachments.RemovedWithCalls(), ::testing::ElementsAre(id));
  EXPECT_FALSE(attachments.EndCall(id));
  EXPECT_THAT(attachments.RemovedWithCalls(), ::testing::ElementsAre(id));
  EXPECT_FALSE(attachments.EndCall(id));
  EXPECT_THAT(attachments.RemovedWithCalls(), ::testing::IsEmpty());
}

TEST(Attachments, InSessionFromTheFirstEnteredToTheLastLeft) {
  Attachments attachments;
  const auto added = attachments.Add(0, 7);
  ASSERT_TRUE(added.ok());
  const AttachmentId id = added->trainer.attachment;
  EXPECT_FALSE(attachments.InSession(id));
  attachments.Entered(id, SessionId(1));
  attachments.Entered(id, SessionId(2));
  attachments.Left(id, SessionId(1));
  EXPECT_TRUE(attachments.InSession(id));
  attachments.Left(id, SessionId(2));
  EXPECT_FALSE(attachments.InSession(id));
}

}  // namespace
}  // namespace dmuon::server
