#include "server/route/route.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

TEST(Scale, IsThatOfTheLogicalBlock) {
  EXPECT_DOUBLE_EQ(Scale(AdjustLr::kMatchRmsAdamw, 100, 400), 4);
  EXPECT_DOUBLE_EQ(Scale(AdjustLr::kMatchRmsAdamw, 400, 100), 4);
  EXPECT_DOUBLE_EQ(Scale(AdjustLr::kOriginal, 400, 100), 2);
  EXPECT_DOUBLE_EQ(Scale(AdjustLr::kOriginal, 100, 400), 1);
  EXPECT_DOUBLE_EQ(Scale(AdjustLr::kSpectral, 100, 400), 0.5);
  EXPECT_DOUBLE_EQ(Scale(AdjustLr::kNone, 100, 400), 1);
}

struct Owned {
  explicit Owned(const Parameter& p) : memory(ArraysOf(p.route) * p.numel()) {
    Assign(p.route, p.numel(), memory.data(), state);
    for (int64_t i = 0; i < p.numel(); ++i) {
      state.gradient[i] = std::sin(0.7f * i + 0.1f * i * i);
      state.weight[i] = std::cos(0.3f * i);
    }
  }
  std::vector<float> memory;
  ParameterState state;
};

// A layout of blocks, as trainers declare them.
struct Layout {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<Block> blocks;
};

std::vector<Block> BlocksOf(const std::vector<int64_t>& rows) {
  std::vector<Block> blocks;
  for (int64_t at = 0; int64_t count : rows) blocks.push_back({at, at + count}), at += count;
  return blocks;
}

std::vector<Layout> Layouts() {
  return {{"heads", {12 * 64, 96}, BlocksOf(std::vector<int64_t>(12, 64))},
          // For each group of 4 heads: their queries, one key and one value.
          {"grouped qkv", {4 * 96, 80}, BlocksOf({64, 16, 16, 64, 16, 16, 64, 16, 16, 64, 16, 16})},
          {"gate and up", {2 * 144, 40}, BlocksOf({144, 144})},
          {"experts", {9, 24, 36}, BlocksOf(std::vector<int64_t>(9, 24))},
          {"convolution", {32, 3, 5, 5}, BlocksOf({32})},
          {"unequal parts", {3 + 70 + 3 + 70 + 3, 50}, BlocksOf({3, 70, 3, 70, 3})}};
}

class RouteTest : public ::testing::Test {
 protected:
  static Parameter Fused(std::vector<Block> blocks, int64_t rows) {
    return {"w", {rows, 10}, Route::kMuon, BoundaryId(0), std::move(blocks)};
  }
  // One step; what it measured of each block, in the order of the blocks.
  std::vector<BlockMeasures> Run(const Parameter& p, ParameterState& state) {
    const OptimizerSpec spec;
    NewtonSchulzPlans plans(*backend_, spec);
    auto update = *MakeUpdate(plans, p, state);
    // Unaligned vectors would do; the workspace wants the backend's alignment.
    void* workspace = *backend_->Allocate(PlanUpdate(*backend_, p, spec)->workspace_bytes + 1);
    std::vector<double> sums(SumsOf(p));
    const UpdatePlace place{static_cast<std::byte*>(workspace), sums.data()};
    EXPECT_TRUE(update->Prepare(place).ok());
    update->Compute({}, inputs_, place);
    update->Commit({}, inputs_, place);
    EXPECT_TRUE(backend_->Synchronize({}).ok());
    backend_->Free(workspace);
    std::vector<BlockMeasures> measures(update->blocks().size()), ordered(measures.size());
    update->Measures(sums, absl::MakeSpan(measures));
    for (size_t i = 0; i < measures.size(); ++i) ordered[update->blocks()[i].index] = measures[i];
    return ordered;
  }
  std::unique_ptr<kernels::Backend> backend_ = *kernels::CreateBackend("cpu", 1);
  const UpdateInputs inputs_{{.lr = 0.02,
                              .weight_decay = 0.1,
                              .momentum = 0.95,
                              .beta1 = 0.9,
                              .beta2 = 0.999,
                              .eps = 1e-8},
                             1};
};

TEST_F(RouteTest, EachBlockEqualsThePartRunAloneForAnyNumberOfThreads) {
  for (int threads : {1, 2, 3}) {
    backend_ = *kernels::CreateBackend("cpu", threads);
    for (const Layout& layout : Layouts()) {
      const Parameter whole = {"w", layout.shape, Route::kMuon, BoundaryId(0), layout.blocks};
      const int64_t cols = AsMatrix(whole).cols;
      Owned all(whole);
      const std::vector<BlockMeasures> measures = Run(whole, all.state);
      ASSERT_EQ(measures.size(), layout.blocks.size());
      for (size_t i = 0; i < layout.blocks.size(); ++i) {
        const Block block = layout.blocks[i];
        const int64_t rows = block.row_end - block.row_begin, begin = block.row_begin * cols;
        const Parameter part = {"part", {rows, cols}, Route::kMuon, BoundaryId(0), {{0, rows}}};
        Owned before(whole), alone(part);
        std::copy_n(before.state.weight + begin, part.numel(), alone.state.weight);
        std::copy_n(before.state.gradient + begin, part.numel(), alone.state.gradient);
        const BlockMeasures expected = Run(part, alone.state)[0];
        for (StateKind kind : {StateKind::kWeight, StateKind::kMomentum}) {
          EXPECT_EQ(std::memcmp(Array(alone.state, kind), Array(all.state, kind) + begin,
                                sizeof(float) * part.numel()),
                    0)
              << layout.name << ", block " << i << ", " << threads << " threads";
        }
        EXPECT_EQ(measures[i].norm, expected.norm) << layout.name << ", block " << i;
        EXPECT_EQ(measures[i].update_rms, expected.update_rms) << layout.name << ", block " << i;
        EXPECT_EQ(measures[i].orthogonality_error, expected.orthogonality_error);
      }
    }
  }
}

TEST_F(RouteTest, WhatIsMeasuredIsWhatItSays) {
  const Parameter p = {"w", {48, 30}, Route::kMuon, BoundaryId(0), BlocksOf({18, 30})};
  Owned owned(p);
  const std::vector<float> before(owned.state.weight, owned.state.weight + p.numel());
  const std::vector<BlockMeasures> measures = Run(p, owned.state);
  for (size_t b = 0; b < 2; ++b) {
    const Block block = p.blocks[b];
    double norm = 0, moved = 0;
    for (int64_t i = block.row_begin * 30; i < block.row_end * 30; ++i) {
      const double u = 1.95 * owned.state.gradient[i];  // G + mu M, where M = G
      norm += u * u;
      const double step = (before[i] * (1 - 0.02 * 0.1) - owned.state.weight[i]) / 0.02;
      moved += step * step;
    }
    EXPECT_TRUE(measures[b].ran);
    EXPECT_NEAR(measures[b].norm, std::sqrt(norm), 1e-5 * std::sqrt(norm));
    const double rms = std::sqrt(moved / (30.0 * (block.row_end - block.row_begin)));
    EXPECT_NEAR(measures[b].update_rms, rms, 1e-3 * rms);
  }
}

TEST_F(RouteTest, ComputeWritesNoState) {
  for (Route route : {Route::kMuon, Route::kAdamw}) {
    Parameter p =
        Fused(route == Route::kMuon ? std::vector<Block>{{0, 12}} : std::vector<Block>{}, 12);
    p.route = route;
    Owned owned(p);
    const std::vector<float> before = owned.memory;
    const OptimizerSpec spec;
    NewtonSchulzPlans plans(*backend_, spec);
    auto update = *MakeUpdate(plans, p, owned.state);
    void* workspace = *backend_->Allocate(PlanUpdate(*backend_, p, spec)->workspace_bytes + 1);
    std::vector<double> sums(SumsOf(p));
    update->Compute({}, inputs_, {static_cast<std::byte*>(workspace), sums.data()});
    EXPECT_EQ(owned.memory, before) << Name(route);
    backend_->Free(workspace);
  }
}

TEST_F(RouteTest, BlocksThatAreAlikeShareAPlan) {
  const OptimizerSpec spec;
  NewtonSchulzPlans plans(*backend_, spec);
  const auto one = *plans.For(16, 10, 2);
  EXPECT_EQ(*plans.For(16, 10, 2), one);
  EXPECT_NE(*plans.For(16, 10, 3), one);
  EXPECT_NE(*plans.For(10, 16, 2), one);
  EXPECT_FALSE(plans.For(0, 16, 2).ok());
}

TEST_F(RouteTest, ARouteThatIsNotBuiltNamesItself) {
  Parameter p = Fused({}, 12);
  p.route = Route::kShardedAdamw;
  ParameterState state;
  const OptimizerSpec spec;
  NewtonSchulzPlans plans(*backend_, spec);
  const absl::Status status = MakeUpdate(plans, p, state).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("sharded_adamw"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::server
