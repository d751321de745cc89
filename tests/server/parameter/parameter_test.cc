#include "server/parameter/parameter.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

using ::testing::HasSubstr;

ParameterTable One(Parameter p) {
  ParameterTable t;
  t.boundaries = {{"layer", false}};
  t.parameters = {std::move(p)};
  return t;
}

Parameter Matrix(std::vector<int64_t> shape, Route route = Route::kMuon,
                 std::vector<Block> blocks = {}) {
  return {"layer.w", std::move(shape), route, BoundaryId(0), std::move(blocks)};
}

void ExpectRefused(ParameterTable table, absl::StatusCode code, const std::string& text) {
  const absl::Status status = CheckAndResolve(table);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(text));
}

TEST(ParameterTable, AVectorOnTheMuonRouteIsRefusedByName) {
  ExpectRefused(One(Matrix({8})), absl::StatusCode::kInvalidArgument,
                "'layer.w': route muon: expected at least 2");
}

TEST(ParameterTable, ShapesThatCannotBeAreRefused) {
  ExpectRefused(One(Matrix({})), absl::StatusCode::kInvalidArgument, "1 to 8 dimensions, got 0");
  ExpectRefused(One(Matrix({4, 0})), absl::StatusCode::kInvalidArgument, "4 x 0");
  ExpectRefused(One(Matrix({4, -1})), absl::StatusCode::kInvalidArgument, "4 x -1");
  ExpectRefused(One(Matrix({int64_t{1} << 40, int64_t{1} << 40})),
                absl::StatusCode::kInvalidArgument, "fits memory");
  ExpectRefused(One(Matrix(std::vector<int64_t>(9, 1))), absl::StatusCode::kInvalidArgument,
                "got 9");
}

TEST(ParameterTable, NamesAndBoundariesThatCannotBeAreRefused) {
  Parameter p = Matrix({4, 4});
  p.name = "";
  ExpectRefused(One(p), absl::StatusCode::kInvalidArgument, "1 to 256 bytes, got 0");
  p.name = std::string(257, 'x');
  ExpectRefused(One(p), absl::StatusCode::kInvalidArgument, "got 257");
  p.name = "a\x1b[31m";
  ExpectRefused(One(p), absl::StatusCode::kInvalidArgument,
                "no control characters, got 'a\\x1b[31m'");
  p = Matrix({4, 4});
  p.boundary = BoundaryId(1);
  ExpectRefused(One(p), absl::StatusCode::kInvalidArgument,
                "boundary: expected an index below 1, got 1");
  ParameterTable twice = One(Matrix({4, 4}));
  twice.parameters.push_back(twice.parameters[0]);
  ExpectRefused(twice, absl::StatusCode::kInvalidArgument, "occurs twice");
  ParameterTable unused = One(Matrix({4, 4}));
  unused.boundaries.push_back({"empty", false});
  ExpectRefused(unused, absl::StatusCode::kInvalidArgument, "'empty': it has no parameter");
  ExpectRefused({}, absl::StatusCode::kInvalidArgument, "got 0");
}

TEST(CheckName, ControlCharactersAreRefusedAndOtherTextIsNot) {
  for (const absl::string_view name :
       {absl::string_view("a\0b", 3), absl::string_view("a\nb"), absl::string_view("\x7f")}) {
    EXPECT_EQ(CheckName("job", name, EmptyName::kAllowed).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(CheckName("job", "run 7: caf\u00e9/\u6a21", EmptyName::kRefused).ok());
  EXPECT_TRUE(CheckName("boundary name", "", EmptyName::kAllowed).ok());
  EXPECT_FALSE(CheckName("job", "", EmptyName::kRefused).ok());
}

TEST(ParameterTable, BlocksMustTileTheRows) {
  for (const std::vector<Block>& blocks : {std::vector<Block>{{0, 2}},
                                           {{0, 2}, {3, 4}},
                                           {{0, 3}, {2, 4}},
                                           {{0, 4}, {4, 5}},
                                           {{2, 4}, {0, 2}},
                                           {{0, 0}}}) {
    ExpectRefused(One(Matrix({4, 4}, Route::kMuon, blocks)), absl::StatusCode::kInvalidArgument,
                  "tile 4 rows");
  }
  ParameterTable t = One(Matrix({4, 4}, Route::kMuon, {{0, 1}, {1, 4}}));
  EXPECT_TRUE(CheckAndResolve(t).ok());
}

TEST(ParameterTable, DefaultBlocksAreTheWholeOrOneForEachLeadingIndex) {
  ParameterTable matrix = One(Matrix({4, 6})), experts = One(Matrix({3, 4, 6})),
                 conv = One(Matrix({8, 3, 5, 5}));
  ASSERT_TRUE(CheckAndResolve(matrix).ok() && CheckAndResolve(experts).ok() &&
              CheckAndResolve(conv).ok());
  EXPECT_EQ(matrix.parameters[0].blocks.size(), 1u);
  EXPECT_EQ(experts.parameters[0].blocks.size(), 3u);
  EXPECT_EQ(experts.parameters[0].blocks[2].row_begin, 8);
  EXPECT_EQ(conv.parameters[0].blocks.size(), 1u);
  EXPECT_EQ(AsMatrix(conv.parameters[0]).cols, 75);
}

TEST(ParameterTable, ARouteThatIsNotBuiltNamesItself) {
  ExpectRefused(One(Matrix({4, 4}, Route::kShardedAdamw)), absl::StatusCode::kUnimplemented,
                "sharded_adamw");
}

TEST(ParameterTable, TheDigestSeesEveryField) {
  const ParameterTable base = One(Matrix({4, 6}));
  const auto changed = [&](auto change) {
    ParameterTable t = base;
    change(t);
    EXPECT_FALSE(FirstDifference(base, t).empty());
    return Digest(t);
  };
  const uint64_t digest = Digest(base);
  EXPECT_NE(digest, changed([](ParameterTable& t) { t.parameters[0].name = "layer.x"; }));
  EXPECT_NE(digest, changed([](ParameterTable& t) { t.parameters[0].shape = {6, 4}; }));
  EXPECT_NE(digest, changed([](ParameterTable& t) { t.parameters[0].route = Route::kAdamw; }));
  EXPECT_NE(digest, changed([](ParameterTable& t) { t.parameters[0].blocks = {{0, 2}, {2, 4}}; }));
  EXPECT_NE(digest, changed([](ParameterTable& t) { t.boundaries[0].exclusive_window = true; }));
  EXPECT_NE(digest, changed([](ParameterTable& t) { t.boundaries[0].name = "other"; }));
  EXPECT_EQ(digest, Digest(base));
  EXPECT_EQ(FirstDifference(base, base), "");
}

}  // namespace
}  // namespace dmuon::server
