#include "server/placement/placement.h"

#include <algorithm>
#include <cstdio>
#include <memory>
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

// max / mean <= 1.10 wherever the largest parameter does not exceed the mean; or at the lower bound.
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
      // What must share a slot can put the bound itself above a tenth, however small the largest is.
      const double allowed = largest <= mean ? 1.10 * mean : 0;
      EXPECT_LE(max, std::max(allowed, 1.001 * p.lower_bound)) << model.name << " on " << slots;
    }
  }
}

TEST(Placement, LoadsOfRealModelsAreWithinATenthOfTheMeanOrAtTheLowerBound) {
  ExpectBalanced({}, /*measured=*/false);
}

// What `dmuond --calibrate` printed on an AMD EPYC (Zen 5) with bf16 units, two threads, in the default dtype.
std::shared_ptr<const kernels::CostTable> MeasuredCosts() {
  kernels::CostSeries series;
  series.asked = {std::nullopt};
  series.sides = {32, 64, 128, 256, 512, 1024};
  series.aspects = {1, 1.5, 2, 4, 8};
  series.rates = {{114e9, 94e9},  {93e9, 87e9},   {104e9, 92e9},  {116e9, 96e9},  {141e9, 101e9},
                  {213e9, 108e9}, {249e9, 113e9}, {273e9, 117e9}, {343e9, 135e9}, {392e9, 167e9},
                  {512e9, 264e9}, {555e9, 274e9}, {576e9, 283e9}, {662e9, 319e9}, {686e9, 362e9},
                  {782e9, 403e9}, {795e9, 414e9}, {808e9, 426e9}, {834e9, 466e9}, {845e9, 519e9},
                  {910e9, 497e9}, {905e9, 513e9}, {900e9, 516e9}, {892e9, 547e9}, {886e9, 590e9},
                  {939e9, 516e9}, {935e9, 531e9}, {948e9, 547e9}, {940e9, 588e9}, {943e9, 644e9}};
  return std::make_shared<const kernels::CostTable>(kernels::CostTable{{series}, 67e9});
}

TEST(Placement, LoadsOfRealModelsAreBalancedByMeasuredCostsToo) {
  ExpectBalanced({.costs = MeasuredCosts()}, /*measured=*/true);
}

TEST(Placement, MeasuredCostsAreSecondsOfTheFormThatRunsAndOfTheBytes) {
  const ParameterTable table = OneLayer({{"square", {1024, 1024}}, {"bias", {1024}}});
  const kernels::NewtonSchulzOptions options{.costs = MeasuredCosts()};
  const ParameterCosts costs = Costs(table, options);
  EXPECT_TRUE(costs.measured);
  const double direct =
      kernels::Seconds(options.costs->series[0], kernels::NsForm::kDirect, options, 1024, 1024);
  EXPECT_NEAR(costs.each[0], direct + 32 * 1024.0 * 1024 / 67e9, 1e-9);
  EXPECT_NEAR(costs.each[1], 28 * 1024 / 67e9, 1e-12);
  // Options that were not measured go by FLOPs, all of them.
  kernels::NewtonSchulzOptions fp16 = options;
  fp16.iteration_dtype = Dtype::kF16;
  EXPECT_FALSE(Costs(table, fp16).measured);
  EXPECT_GT(Costs(table, fp16).each[0], 1e9);
}

TEST(Placement, OtherCostsKeepTheOwnersAndWeighThemAnew) {
  const ParameterTable table = Llama8B();
  Placement p = PlaceOn(table, 8);
  const std::vector<SlotId> owners = p.owner;
  kernels::NewtonSchulzOptions ten;
  ten.steps = 10;
  const ParameterCosts costs = Costs(table, ten);
  Weigh(p, costs);
  EXPECT_EQ(p.owner, owners);
  EXPECT_EQ(p.cost, costs.each);
  std::vector<double> sums(8, 0);
  for (size_t i = 0; i < owners.size(); ++i) sums[owners[i].index()] += costs.each[i];
  EXPECT_EQ(p.load, sums);
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
