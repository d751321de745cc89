// Who sends what to whom, computed once a session from the two sides: who holds what, and who owns what.
//
// Read forwards it is the reduction: for each owned range, the ranks whose regions intersect it, averaged where they
// overlap, concatenated where they do not. Read backwards it is the publication. There is no other path.
#ifndef DMUON_SERVER_PLACEMENT_PLAN_H_
#define DMUON_SERVER_PLACEMENT_PLAN_H_

#include <vector>

#include "server/parameter/parameter.h"
#include "server/placement/mesh.h"
#include "server/placement/placement.h"

namespace dmuon::server {

// A range of elements of a parameter in row-major order: all of it under data parallelism.
struct Region {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Elements [range) of the parameter come from, and go back to, the same places of these slots, in rank order.
struct Piece {
  Region range;
  std::vector<SlotId> holders;
};

// One parameter seen from its owner.
struct Transfer {
  ParameterId parameter;
  SlotId owner;
  std::vector<Piece> pieces;
};

struct Plan {
  std::vector<Transfer> transfers;  // by parameter
  std::vector<std::vector<ParameterId>>
      owned;  // by slot, in the order of boundaries, then of the table
  std::vector<std::vector<SlotId>> owners;           // by boundary: slots that own something of it
  std::vector<std::vector<ParameterId>> parameters;  // by boundary, in the order of the table
};

// What rank `slot` holds of the parameter.
Region HeldBy(const Parameter& parameter, const Mesh& mesh, SlotId slot);

Plan MakePlan(const ParameterTable& table, const Mesh& mesh, const Placement& placement);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_PLACEMENT_PLAN_H_
