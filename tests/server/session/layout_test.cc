#include "server/session/layout.h"

#include <set>

#include "tests/server/session/fixture.h"

namespace dmuon::server {
namespace {

using testing::SmallOptimizer;
using testing::SmallTable;

TEST(Layout, EveryPlaceIsAlignedAndNoTwoOverlapWhenResident) {
  const ParameterTable table = SmallTable();
  const Layout l = MakeLayout(table, SmallOptimizer(), false);
  uint64_t end = 0;
  for (size_t p = 0; p < table.parameters.size(); ++p) {
    EXPECT_EQ(l.grad_offset[p] % 256, 0u);
    EXPECT_GE(l.grad_offset[p], end);
    end = l.grad_offset[p] + 4 * table.parameters[p].numel();
  }
  EXPECT_LE(end, l.grad_bytes);
}

TEST(Layout, AHalfWidthWeightTakesHalfThePlace) {
  ParameterTable table = SmallTable();
  OptimizerSpec spec = SmallOptimizer();
  for (ParameterConfig& c : spec.parameters) c.param_dtype = Dtype::kBF16;
  const Layout half = MakeLayout(table, spec, false);
  EXPECT_EQ(half.weight_offset[1], 512u);  // 240 elements of 2 bytes, rounded up
  EXPECT_EQ(half.grad_offset[1], 1024u);   // of 4 bytes
}

TEST(Layout, WindowsAreSharedInTurnAndNeverByAnExclusiveBoundary) {
  ParameterTable table;
  OptimizerSpec spec;
  spec.groups = {{"g", Route::kMuon}};
  for (int b = 0; b < 5; ++b) {
    table.boundaries.push_back({std::to_string(b), b == 4});
    table.parameters.push_back(
        {"p" + std::to_string(b), {64, 64}, Route::kMuon, BoundaryId(b), {}});
    spec.parameters.push_back({});
  }
  const Layout l = MakeLayout(table, spec, true);
  EXPECT_EQ(l.window, (std::vector<int>{0, 1, 0, 1, 2}));
  EXPECT_EQ(l.weight_offset[0], l.weight_offset[2]);
  EXPECT_NE(l.weight_offset[0], l.weight_offset[1]);
  EXPECT_EQ(l.weight_bytes, 3u * 64 * 64 * 4);
}

TEST(Layout, WindowsAreNumberedWithoutGapsHoweverFewTakeTurns) {
  for (int in_turn : {0, 1, 2, 5}) {
    for (int exclusive : {0, 1, 3}) {
      ParameterTable table;
      OptimizerSpec spec;
      for (int b = 0; b < in_turn + exclusive; ++b) {
        table.boundaries.push_back({std::to_string(b), b >= in_turn});
        table.parameters.push_back(
            {"p" + std::to_string(b), {4, 4}, Route::kMuon, BoundaryId(b), {}});
        spec.parameters.push_back({});
      }
      if (table.boundaries.empty()) continue;
      const Layout l = MakeLayout(table, spec, true);
      const std::set<int> used(l.window.begin(), l.window.end());
      EXPECT_EQ(used.size(), static_cast<size_t>(std::min(in_turn, 2) + exclusive));
      EXPECT_EQ(*used.begin(), 0);
      EXPECT_EQ(*used.rbegin(), static_cast<int>(used.size()) - 1);
    }
  }
}

}  // namespace
}  // namespace dmuon::server
