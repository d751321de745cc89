#include "server/route/route.h"

#include <cmath>
#include <cstring>
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

class RouteTest : public ::testing::Test {
 protected:
  static Parameter Fused(std::vector<Block> blocks, int64_t rows) {
    return {"w", {rows, 10}, Route::kMuon, BoundaryId(0), std::move(blocks)};
  }
  void Run(const Parameter& p, ParameterState& state) {
    OptimizerSpec spec;
    spec.newton_schulz.deterministic = true;
    auto update = *MakeUpdate(*backend_, p, spec, state);
    // Unaligned vectors would do; the workspace wants the backend's alignment.
    void* workspace = *backend_->Allocate(update->workspace_bytes() + 1);
    update->Compute({}, inputs_, static_cast<std::byte*>(workspace));
    update->Commit({}, inputs_, static_cast<std::byte*>(workspace));
    ASSERT_TRUE(backend_->Synchronize({}).ok());
    backend_->Free(workspace);
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

TEST_F(RouteTest, AFusedWeightEqualsItsPartsRunAlone) {
  const Parameter fused = Fused({{0, 4}, {4, 12}}, 12);
  Owned whole(fused);
  const Parameter top = Fused({{0, 4}}, 4), bottom = Fused({{0, 8}}, 8);
  Owned first(top), second(bottom);
  std::memcpy(first.state.weight, whole.state.weight, 40 * 4);
  std::memcpy(first.state.gradient, whole.state.gradient, 40 * 4);
  std::memcpy(second.state.weight, whole.state.weight + 40, 80 * 4);
  std::memcpy(second.state.gradient, whole.state.gradient + 40, 80 * 4);
  Run(fused, whole.state);
  Run(top, first.state);
  Run(bottom, second.state);
  EXPECT_EQ(std::memcmp(first.state.weight, whole.state.weight, 40 * 4), 0);
  EXPECT_EQ(std::memcmp(second.state.weight, whole.state.weight + 40, 80 * 4), 0);
}

TEST_F(RouteTest, ComputeWritesNoState) {
  for (Route route : {Route::kMuon, Route::kAdamw}) {
    Parameter p =
        Fused(route == Route::kMuon ? std::vector<Block>{{0, 12}} : std::vector<Block>{}, 12);
    p.route = route;
    Owned owned(p);
    const std::vector<float> before = owned.memory;
    OptimizerSpec spec;
    auto update = *MakeUpdate(*backend_, p, spec, owned.state);
    void* workspace = *backend_->Allocate(update->workspace_bytes() + 1);
    update->Compute({}, inputs_, static_cast<std::byte*>(workspace));
    EXPECT_EQ(owned.memory, before) << Name(route);
    backend_->Free(workspace);
  }
}

TEST_F(RouteTest, ARouteThatIsNotBuiltNamesItself) {
  Parameter p = Fused({}, 12);
  p.route = Route::kShardedAdamw;
  ParameterState state;
  const absl::Status status = MakeUpdate(*backend_, p, {}, state).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("sharded_adamw"), std::string::npos);
}

}  // namespace
}  // namespace dmuon::server
