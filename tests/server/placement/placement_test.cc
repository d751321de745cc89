#include "server/placement/placement.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/newton_schulz/cost_table.h"
#include "tests/server/placement/models.h"

namespace dmuon::server {
namespace {

ParameterTable OneLayer(const std::vector<testing::Shape>& shapes) {
  return testing::TableOf({"one layer", {{"layers", 1, shapes}}, {}});
}

ParameterTable Llama8B() { return testing::TableOf(testing::PublishedModels()[0]); }

Placement PlaceOn(const ParameterTable& table, int slots,
                  const kernels::NewtonSchulzOptions& options = {}) {
  Mesh mesh;
  mesh.shard = slots;
  return Place(table, mesh, Costs(table, options));
}

// max / mean <= 1.10 wherever the largest parameter does not exceed the mean; else at the lower bound.
void ExpectBalanced(const kernels::NewtonSchulzOptions& options, bool measured) {
  std::printf("  %-28s owners  max/mean  bound/mean  max/bound\n",
              measured ? "by a measured table" : "by FLOPs");
  for (const testing::Model& model : testing::PublishedModels()) {
    const ParameterTable table = testing::TableOf(model);
    for (int slots : {2, 8, 16, 64}) {
      const Placement p = PlaceOn(table, slots, options);
      EXPECT_EQ(p.measured, measured);
      const double max = *std::max_element(p.load.begin(), p.load.end());
      const double mean = std::accumulate(p.load.begin(), p.load.end(), 0.0) / slots;
      const double largest = *std::max_element(p.cost.begin(), p.cost.end());
      std::printf("  %-28s %6d  %8.4f  %10.4f  %9.4f\n", model.name.c_str(), slots, max / mean,
                  p.lower_bound / mean, max / p.lower_bound);
      if (largest <= mean) {
        EXPECT_LE(max, 1.10 * mean) << model.name << " on " << slots;
      } else {
        EXPECT_LE(max, 1.001 * p.lower_bound) << model.name << " on " << slots;
      }
    }
  }
}

TEST(Placement, LoadsOfRealModelsAreWithinATenthOfTheMeanOrAtTheLowerBound) {
  ExpectBalanced({}, /*measured=*/false);
}

TEST(Placement, LoadsAreTheSumsOfTheCosts) {
  const ParameterTable table = Llama8B();
  const Placement p = PlaceOn(table, 3);
  std::vector<double> sums(3, 0);
  for (size_t i = 0; i < p.owner.size(); ++i) sums[p.owner[i].index()] += p.cost[i];
  for (int s = 0; s < 3; ++s) EXPECT_NEAR(p.load[s], sums[s], 1e-6 * sums[s]);
}

TEST(Placement, TheSameInputGivesTheSameOwners) {
  EXPECT_EQ(PlaceOn(Llama8B(), 5).owner, PlaceOn(Llama8B(), 5).owner);
}

TEST(Placement, OneLayersMatricesAreSpread) {
  const Placement p = PlaceOn(OneLayer({{"q", {512, 512}}, {"k", {512, 512}}}), 2);
  EXPECT_NE(p.owner[0], p.owner[1]);
}

TEST(Placement, SmallParametersOfABoundaryTravelTogether) {
  ParameterTable t = OneLayer({{"q", {2048, 2048}}, {"k", {2048, 2048}}});
  for (int i = 0; i < 4; ++i) {
    t.parameters.push_back({absl::StrCat("bias", i), {64}, Route::kAdamw, BoundaryId(0), {}});
  }
  ASSERT_TRUE(CheckAndResolve(t).ok());
  const Placement p = PlaceOn(t, 2);
  for (int i = 3; i < 6; ++i) EXPECT_EQ(p.owner[i], p.owner[2]);
}

TEST(Placement, MoreSlotsThanParametersLeavesSomeWithoutLoad) {
  const Placement p = PlaceOn(OneLayer({{"q", {64, 64}}}), 4);
  EXPECT_DOUBLE_EQ(p.imbalance, 4);
  EXPECT_DOUBLE_EQ(p.lower_bound, p.cost[0]);
}

TEST(Mesh, AnAxisOutOfRangeIsRefusedAndTensorParallelismNamesItself) {
  Mesh mesh;
  mesh.shard = 0;
  EXPECT_EQ(Check(mesh).code(), absl::StatusCode::kInvalidArgument);
  mesh = {};
  mesh.replicate = 4096;
  mesh.shard = 2;
  EXPECT_EQ(Check(mesh).code(), absl::StatusCode::kInvalidArgument);
  mesh = {};
  mesh.tp = 2;
  EXPECT_EQ(Check(mesh).code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace dmuon::server
