#include "server/route/route.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dmuon::server {

float* Array(const ParameterState& state, StateKind kind) {
  switch (kind) {
    case StateKind::kWeight: return state.weight;
    case StateKind::kMomentum: return state.momentum;
    case StateKind::kExpAvg: return state.exp_avg;
    case StateKind::kExpAvgSq: return state.exp_avg_sq;
    case StateKind::kStep: return nullptr;
  }
  return nullptr;
}

int ArraysOf(Route route) { return route == Route::kMuon ? 3 : 4; }

void Assign(Route route, int64_t numel, float* memory, ParameterState& state) {
  state.weight = memory;
  state.gradient = memory + numel;
  if (route == Route::kMuon) {
    state.momentum = memory + 2 * numel;
  } else {
    state.exp_avg = memory + 2 * numel;
    state.exp_avg_sq = memory + 3 * numel;
  }
}

namespace {

absl::Status NotBuilt(Route route) {
  return absl::UnimplementedError(absl::StrCat("route ", Name(route), " is not built yet"));
}

}  // namespace

absl::StatusOr<UpdateMemory> PlanUpdate(const kernels::Backend& backend, const Parameter& parameter,
                                        const OptimizerSpec& spec) {
  switch (parameter.route) {
    case Route::kMuon: return PlanMuon(backend, parameter, spec);
    case Route::kAdamw: return UpdateMemory{};
    case Route::kShardedAdamw: break;
  }
  return NotBuilt(parameter.route);
}

absl::StatusOr<std::shared_ptr<kernels::NewtonSchulz>> NewtonSchulzPlans::For(int64_t rows,
                                                                              int64_t cols,
                                                                              int64_t blocks) {
  std::shared_ptr<kernels::NewtonSchulz>& made = made_[{rows, cols, blocks}];
  if (made == nullptr) {
    ASSIGN_OR_RETURN(made,
                     kernels::PlanNewtonSchulz(backend_, spec_.newton_schulz, rows, cols, blocks));
  }
  return made;
}

absl::StatusOr<std::unique_ptr<Update>> MakeUpdate(NewtonSchulzPlans& plans,
                                                   const Parameter& parameter,
                                                   ParameterState& state) {
  switch (parameter.route) {
    case Route::kMuon: return MakeMuon(plans, parameter, state);
    case Route::kAdamw: return MakeAdamw(plans, parameter, state);
    case Route::kShardedAdamw: break;
  }
  return NotBuilt(parameter.route);
}

}  // namespace dmuon::server
