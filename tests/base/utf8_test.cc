#include "base/utf8.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace dmuon {
namespace {

TEST(Utf8, WellFormedTextOfEachLengthIsAccepted) {
  for (const char* text : {"", "plain", "\x7f", "\u00e9", "\u0800", "\ud7ff", "\ue000", "\uffff",
                           "\U00010000", "\U0010ffff", "a\u00e9b\U0001f600c"}) {
    EXPECT_TRUE(IsUtf8(text)) << text;
  }
  EXPECT_TRUE(IsUtf8(absl::string_view("\0", 1)));
}

TEST(Utf8, WhatIsCutOverlongASurrogateOrTooLargeIsRefused) {
  for (const char* text : {"\x80", "\xff", "\xc3", "\xe0\xa0", "\xf0\x90\x80", "\xc3z", "\xc0\x80",
                           "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
                           "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "good\xfe"}) {
    EXPECT_FALSE(IsUtf8(text)) << absl::string_view(text);
  }
}

TEST(Utf8, TheErrorNamesTheThingAndShowsTheBytes) {
  const absl::Status status = CheckUtf8("session", "a\xff");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "session: expected UTF-8, given 'a\\xff'");
}

}  // namespace
}  // namespace dmuon
