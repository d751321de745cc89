#include "server/placement/placement.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

struct Shape {
  const char* name;
  int64_t rows, cols;
};

ParameterTable Transformer(int layers, const std::vector<Shape>& shapes, int copies = 1) {
  ParameterTable t;
  for (int l = 0; l < layers; ++l) {
    t.boundaries.push_back({absl::StrCat("layers.", l), false});
    for (int c = 0; c < copies; ++c) {
      for (const Shape& s : shapes) {
        t.parameters.push_back({absl::StrCat("layers.", l, ".", c, ".", s.name),
                                {s.rows, s.cols},
                                Route::kMuon,
                                BoundaryId(l),
                                {}});
      }
    }
  }
  EXPECT_TRUE(CheckAndResolve(t).ok());
  return t;
}

// Shapes of the projections: Llama-3.1-8B and Qwen2.5-7B (their published configurations).
ParameterTable Llama8B() {
  return Transformer(32, {{"q", 4096, 4096},
                          {"k", 1024, 4096},
                          {"v", 1024, 4096},
                          {"o", 4096, 4096},
                          {"gate", 14336, 4096},
                          {"up", 14336, 4096},
                          {"down", 4096, 14336}});
}
ParameterTable Qwen7B() {
  return Transformer(28, {{"q", 3584, 3584},
                          {"k", 512, 3584},
                          {"v", 512, 3584},
                          {"o", 3584, 3584},
                          {"gate", 18944, 3584},
                          {"up", 18944, 3584},
                          {"down", 3584, 18944}});
}

Placement PlaceOn(const ParameterTable& table, int slots) {
  Mesh mesh;
  mesh.shard = slots;
  return Place(table, mesh, Costs(table));
}

TEST(Placement, LoadsOfRealModelsAreWithinATenthOfTheMeanOrAtTheLowerBound) {
  for (const ParameterTable& table : {Llama8B(), Qwen7B()}) {
    for (int slots : {1, 2, 8, 16, 64}) {
      const Placement p = PlaceOn(table, slots);
      const double max = *std::max_element(p.load.begin(), p.load.end());
      EXPECT_LE(max, 1.10 * p.lower_bound) << slots << " slots, imbalance " << p.imbalance;
    }
  }
}

TEST(Placement, LoadsAreTheSumsOfTheCosts) {
  const ParameterTable table = Llama8B();
  const Placement p = PlaceOn(table, 3);
  std::vector<double> sums(3, 0);
  for (size_t i = 0; i < p.owner.size(); ++i) sums[p.owner[i].index()] += p.cost[i];
  for (int s = 0; s < 3; ++s) EXPECT_NEAR(p.load[s], sums[s], 1e-6 * sums[s]);
}

TEST(Placement, TheSameInputGivesTheSameOwners) {
  EXPECT_EQ(PlaceOn(Qwen7B(), 5).owner, PlaceOn(Qwen7B(), 5).owner);
}

TEST(Placement, OneLayersMatricesAreSpread) {
  const Placement p = PlaceOn(Transformer(1, {{"q", 512, 512}, {"k", 512, 512}}), 2);
  EXPECT_NE(p.owner[0], p.owner[1]);
}

TEST(Placement, SmallParametersOfABoundaryTravelTogether) {
  ParameterTable t = Transformer(1, {{"q", 2048, 2048}, {"k", 2048, 2048}});
  for (int i = 0; i < 4; ++i) {
    t.parameters.push_back({absl::StrCat("bias", i), {64}, Route::kAdamw, BoundaryId(0), {}});
  }
  ASSERT_TRUE(CheckAndResolve(t).ok());
  const Placement p = PlaceOn(t, 2);
  for (int i = 3; i < 6; ++i) EXPECT_EQ(p.owner[i], p.owner[2]);
}

TEST(Placement, MoreSlotsThanParametersLeavesSomeWithoutLoad) {
  const Placement p = PlaceOn(Transformer(1, {{"q", 64, 64}}), 4);
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
