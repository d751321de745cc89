// Who owns what: longest processing time first, by the cost of the form that will run.
#ifndef DMUON_SERVER_PLACEMENT_PLACEMENT_H_
#define DMUON_SERVER_PLACEMENT_PLACEMENT_H_

#include <vector>

#include "kernels/newton_schulz/newton_schulz.h"
#include "server/parameter/parameter.h"
#include "server/placement/mesh.h"

namespace dmuon::server {

// What each parameter costs in a step.
struct ParameterCosts {
  bool measured = false;     // seconds by a cost table; else FLOPs plus bytes at ten FLOPs each
  std::vector<double> each;  // by parameter
};

struct Placement {
  std::vector<SlotId> owner;  // by parameter
  std::vector<double> cost;   // by parameter
  bool measured = false;      // of the costs and loads: seconds; else FLOPs
  std::vector<double> load;   // by slot: sums of costs
  double imbalance = 1;       // max / mean of the loads; 1 when all are 0
  double lower_bound =
      0;  // no placement has a smaller max load: the mean, the largest, or what must share a slot
};

// Newton-Schulz over all blocks, in the form that `options` run on them, plus the bytes that the route moves: as
// options.costs has measured it, or by FLOPs where that has nothing about these options.
ParameterCosts Costs(const ParameterTable& table, const kernels::NewtonSchulzOptions& options);

// A pure function of its arguments, the same on every daemon.
Placement Place(const ParameterTable& table, const Mesh& mesh, ParameterCosts costs);

// The same owners under other costs: those of the options, which are known only after the owners have been told.
void Weigh(Placement& placement, ParameterCosts costs);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_PLACEMENT_PLACEMENT_H_
