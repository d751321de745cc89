// What slots conclude from how the gradients came to each of them.
#include "server/step/verdict.h"

#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> Message(uint64_t digest, absl::string_view reason = "") {
  Reduction reduction{.digest = digest};
  if (!reason.empty()) reduction.code = static_cast<uint32_t>(absl::StatusCode::kUnavailable);
  WriteText(reason, reduction.reason, sizeof(reduction.reason));
  std::vector<std::byte> message(sizeof(reduction) + sizeof(double));
  std::memcpy(message.data(), &reduction, sizeof(reduction));
  return message;
}

absl::Status Check(const std::vector<std::vector<std::byte>>& messages) {
  std::vector<absl::Span<const std::byte>> spans;
  for (const auto& message : messages) spans.emplace_back(message);
  return CheckReductions(7, spans);
}

TEST(CheckReductions, IsFineWhereAllCameByTheSameExchanges) {
  EXPECT_TRUE(Check({Message(5), Message(5), Message(5)}).ok());
}

TEST(CheckReductions, OneSlotWithoutItsGradientsAbortsTheStepWithItsReason) {
  const absl::Status status = Check({Message(5), Message(5, "the link is down")});
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("step 7: the gradients did not come to slot 1: the link is down"));
}

TEST(CheckReductions, SlotsThatTookPartInDifferentExchangesAreNamed) {
  const absl::Status status = Check({Message(5), Message(6), Message(5)});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank(s) 0, 2: 0000000000000005; rank(s) 1: 0000000000000006"));
}

}  // namespace
}  // namespace dmuon::server
