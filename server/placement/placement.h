// Who owns what: longest processing time first, by the cost of the form that will run.
#ifndef DMUON_SERVER_PLACEMENT_PLACEMENT_H_
#define DMUON_SERVER_PLACEMENT_PLACEMENT_H_

#include <vector>

#include "server/parameter/parameter.h"
#include "server/placement/mesh.h"

namespace dmuon::server {

struct Placement {
  std::vector<SlotId> owner;  // by parameter
  std::vector<double> cost;   // by parameter: FLOPs plus bytes
  std::vector<double> load;   // by slot
  double imbalance = 1;       // max / mean of the loads; 1 when all are 0
  double lower_bound =
      0;  // no placement has a smaller max load: the mean, the largest, or what must share a slot
};

// By parameter. FLOPs of Newton-Schulz with the default options over all blocks, plus the bytes that the route moves.
std::vector<double> Costs(const ParameterTable& table);

// A pure function of its arguments, the same on every daemon.
Placement Place(const ParameterTable& table, const Mesh& mesh, const std::vector<double>& costs);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_PLACEMENT_PLACEMENT_H_
