#include "server/rpc/state_assembler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dmuon::server::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A table in which 'w' has 8 bytes of weight and 'b' has 4.
class StateAssemblerTest : public ::testing::Test {
 protected:
  static v1::StateChunk Chunk(const std::string& parameter, uint64_t total,
                              const std::string& data) {
    v1::StateChunk chunk;
    chunk.mutable_state()->set_parameter(parameter);
    chunk.mutable_state()->set_kind(v1::STATE_KIND_WEIGHT);
    chunk.set_total_bytes(total);
    chunk.set_data(data);
    return chunk;
  }
  static v1::StateChunk More(const std::string& data) {
    v1::StateChunk chunk;
    chunk.set_data(data);
    return chunk;
  }
  void ExpectRefused(const absl::Status& status, const std::string& text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  std::vector<std::string> written_;
  StateAssembler assembler_{
      [](const std::string& parameter, StateKind) -> absl::StatusOr<uint64_t> {
        if (parameter == "w") return 8;
        if (parameter == "b") return 4;
        return absl::InvalidArgumentError(absl::StrCat("'", parameter, "' is no parameter"));
      },
      [this](const std::string& parameter, StateKind, absl::Span<const std::byte> data) {
        written_.push_back(absl::StrCat(
            parameter, "=", std::string(reinterpret_cast<const char*>(data.data()), data.size())));
        return absl::OkStatus();
      }};
};

TEST_F(StateAssemblerTest, PutsChunksTogetherAndWritesEachStateOnce) {
  ASSERT_TRUE(assembler_.Add(Chunk("w", 8, "abc")).ok());
  EXPECT_THAT(written_, IsEmpty());
  ASSERT_TRUE(assembler_.Add(More("defgh")).ok());
  ASSERT_TRUE(assembler_.Add(Chunk("b", 4, "1234")).ok());
  ASSERT_TRUE(assembler_.Finish().ok());
  EXPECT_THAT(written_, ElementsAre("w=abcdefgh", "b=1234"));
  EXPECT_EQ(assembler_.states_written(), 2);
}

TEST_F(StateAssemblerTest, ALyingTotalIsRefusedBeforeAnythingIsAllocatedForIt) {
  ExpectRefused(assembler_.Add(Chunk("w", uint64_t{1} << 62, "abc")),
                "'w': total_bytes: expected 8, given 4611686018427387904");
  EXPECT_THAT(written_, IsEmpty());
}

TEST_F(StateAssemblerTest, MoreDataThanTheTotalIsRefused) {
  ASSERT_TRUE(assembler_.Add(Chunk("w", 8, "abcdef")).ok());
  ExpectRefused(assembler_.Add(More("ghi")), "'w': data: expected 8 bytes, given more");
}

TEST_F(StateAssemblerTest, AStateThatIsNotWholeWhenTheNextBeginsOrTheStreamEndsIsRefused) {
  ASSERT_TRUE(assembler_.Add(Chunk("w", 8, "abc")).ok());
  ExpectRefused(assembler_.Finish(), "'w': data: expected 8 bytes, given 3");
  ExpectRefused(assembler_.Add(Chunk("b", 4, "1234")), "'w': data: expected 8 bytes, given 3");
  EXPECT_THAT(written_, IsEmpty());
}

TEST_F(StateAssemblerTest, AFirstChunkWithoutNameOrKindAndAnUnknownParameterAreRefused) {
  ExpectRefused(assembler_.Add(More("abc")), "must name it");
  v1::StateChunk chunk = Chunk("w", 8, "abc");
  chunk.mutable_state()->set_kind(v1::STATE_KIND_UNSPECIFIED);
  ExpectRefused(assembler_.Add(chunk), "'w': kind: expected STATE_KIND_WEIGHT");
  ExpectRefused(assembler_.Add(Chunk("nobody", 8, "abc")), "'nobody'");
}

}  // namespace
}  // namespace dmuon::server::rpc
