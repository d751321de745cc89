// How one parameter is updated by its owner: the seam between a step and the optimizers.
//
// An update is planned once, when the session is configured. In a step, Compute reads state and reduced gradient and
// writes only the workspace; Commit is the only writer of state. So a step that ends between two parameters leaves each
// of them wholly at its old or wholly at its new version.
#ifndef DMUON_SERVER_ROUTE_ROUTE_H_
#define DMUON_SERVER_ROUTE_ROUTE_H_

#include <array>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "kernels/ops/backend.h"
#include "proto/wire/control_page.h"
#include "server/parameter/parameter.h"
#include "server/session/types.h"

namespace dmuon::server {

// The private memory of one parameter at its owner; fp32 arrays of numel elements. Null where the route has none.
struct ParameterState {
  float* weight = nullptr;    // W, the master
  float* gradient = nullptr;  // G, the mean over ranks, summed over micros
  float* momentum = nullptr;  // M
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  int64_t adamw_steps = 0;       // updates so far
  double* square_sum = nullptr;  // of G, one for each piece of its transfer
};

// The state array of this kind; null when the route has none.
float* Array(const ParameterState& state, StateKind kind);

// How many fp32 arrays of numel elements the route keeps, the gradient included.
int ArraysOf(Route route);
// Points the arrays of `state` into `memory`, ArraysOf(route) * numel floats.
void Assign(Route route, int64_t numel, float* memory, ParameterState& state);

struct UpdateInputs {
  wire::GroupHyper hyper;
  double clip_coefficient = 1;
};

// What an update will take on its device, before there is one: the workspace of every Compute, and what MakeUpdate takes and
// gives back.
struct UpdateMemory {
  size_t workspace_bytes = 0;
  size_t planning_bytes = 0;
};
absl::StatusOr<UpdateMemory> PlanUpdate(const kernels::Backend& backend, const Parameter& parameter,
                                        const OptimizerSpec& spec);
// How many doubles Compute and Commit leave of a step, for Measures.
size_t SumsOf(const Parameter& parameter);

// What an update works with, in the backend's memory.
struct UpdatePlace {
  std::byte* workspace = nullptr;  // shared with the slot's other updates
  double* sums = nullptr;          // its own
};

class Update {
 public:
  virtual ~Update() = default;
  // Once, before the first Compute, with the place that every Compute will be given.
  virtual absl::Status Prepare(const UpdatePlace& /*place*/) { return absl::OkStatus(); }
  virtual void Compute(kernels::Stream stream, const UpdateInputs& inputs,
                       const UpdatePlace& place) = 0;
  virtual void Commit(kernels::Stream stream, const UpdateInputs& inputs,
                      const UpdatePlace& place) = 0;
  // One for each call of Newton-Schulz in a Compute; none where the route has none.
  virtual absl::Span<const BlockPlan> blocks() const { return {}; }
  // What the sums say of each block.
  virtual void Measures(absl::Span<const double> /*sums*/,
                        absl::Span<BlockMeasures> /*out*/) const {}
};

struct PlannedUpdate {
  std::unique_ptr<Update> update;
  UpdatePlace place;
};

// The Newton-Schulz plans of one slot: parameters whose blocks are alike share one, and what it has recorded.
class NewtonSchulzPlans {
 public:
  // Both must outlive it.
  NewtonSchulzPlans(kernels::Backend& backend, const OptimizerSpec& spec)
      : backend_(backend), spec_(spec) {}
  absl::StatusOr<std::shared_ptr<kernels::NewtonSchulz>> For(int64_t rows, int64_t cols,
                                                             int64_t blocks);
  kernels::Backend& backend() const { return backend_; }
  const OptimizerSpec& spec() const { return spec_; }

 private:
  kernels::Backend& backend_;
  const OptimizerSpec& spec_;
  std::map<std::array<int64_t, 3>, std::shared_ptr<kernels::NewtonSchulz>> made_;
};

// `state` and the plans' backend must outlive the update.
absl::StatusOr<std::unique_ptr<Update>> MakeUpdate(NewtonSchulzPlans& plans,
                                                   const Parameter& parameter,
                                                   ParameterState& state);

// One line each in the lists of PlanUpdate and MakeUpdate. Adamw, elementwise, takes nothing.
absl::StatusOr<UpdateMemory> PlanMuon(const kernels::Backend& backend, const Parameter& parameter,
                                      const OptimizerSpec& spec);
absl::StatusOr<std::unique_ptr<Update>> MakeMuon(NewtonSchulzPlans& plans,
                                                 const Parameter& parameter, ParameterState& state);
absl::StatusOr<std::unique_ptr<Update>> MakeAdamw(NewtonSchulzPlans& plans,
                                                  const Parameter& parameter,
                                                  ParameterState& state);

// The 2-norm of a gradient up to which a muon parameter's momentum and U stay finite in fp32, whatever came before under
// the same bound: |M| <= max / 4 is kept by mu M + G, and U = G + mu M is less than max.
double LargestGradient(double momentum);

// The scale s of a muon update of an out x in block.
double Scale(AdjustLr adjust, int64_t out, int64_t in);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_ROUTE_ROUTE_H_
