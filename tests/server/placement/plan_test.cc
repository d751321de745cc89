#include "server/placement/plan.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

using ::testing::ElementsAre;

TEST(Plan, EveryRankHoldsAllOfAParameterAndItsOwnerOwnsItOnce) {
  ParameterTable table;
  table.boundaries = {{"a", false}, {"b", false}};
  table.parameters = {{"b.w", {4, 6}, Route::kMuon, BoundaryId(1), {}},
                      {"a.w", {4, 6}, Route::kMuon, BoundaryId(0), {}},
                      {"a.v", {4, 6}, Route::kMuon, BoundaryId(0), {}}};
  ASSERT_TRUE(CheckAndResolve(table).ok());
  Mesh mesh;
  mesh.replicate = 2;
  mesh.shard = 2;
  Placement placement;
  placement.owner = {SlotId(3), SlotId(3), SlotId(0)};
  const Plan plan = MakePlan(table, mesh, placement);
  ASSERT_EQ(plan.transfers[0].pieces.size(), 1u);
  EXPECT_EQ(plan.transfers[0].pieces[0].range.size(), 24);
  EXPECT_THAT(plan.transfers[0].pieces[0].holders,
              ElementsAre(SlotId(0), SlotId(1), SlotId(2), SlotId(3)));
  // In the order of boundaries, so that what the next forward needs first is published first.
  EXPECT_THAT(plan.owned[3], ElementsAre(ParameterId(1), ParameterId(0)));
  EXPECT_THAT(plan.owners[0], ElementsAre(SlotId(3), SlotId(0)));
}

}  // namespace
}  // namespace dmuon::server
