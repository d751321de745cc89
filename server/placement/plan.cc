#include "server/placement/plan.h"

#include <algorithm>
#include <set>

namespace dmuon::server {

Region HeldBy(const Parameter& parameter, const Mesh&, SlotId) { return {0, parameter.numel()}; }

namespace {

// Cuts the parameter at every begin and end of a held region, so that each piece has one set of holders.
std::vector<Piece> Pieces(const Parameter& parameter, const Mesh& mesh) {
  std::set<int64_t> cuts;
  for (int s = 0; s < mesh.world_size(); ++s) {
    const Region held = HeldBy(parameter, mesh, SlotId(s));
    cuts.insert(held.begin);
    cuts.insert(held.end);
  }
  std::vector<Piece> pieces;
  for (auto it = cuts.begin(); std::next(it) != cuts.end(); ++it) {
    Piece piece{{*it, *std::next(it)}, {}};
    for (int s = 0; s < mesh.world_size(); ++s) {
      const Region held = HeldBy(parameter, mesh, SlotId(s));
      if (held.begin <= piece.range.begin && piece.range.end <= held.end) {
        piece.holders.push_back(SlotId(s));
      }
    }
    if (!piece.holders.empty()) pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace

Plan MakePlan(const ParameterTable& table, const Mesh& mesh, const Placement& placement) {
  Plan plan;
  plan.owned.resize(mesh.world_size());
  plan.owners.resize(table.boundaries.size());
  plan.parameters.resize(table.boundaries.size());
  for (size_t i = 0; i < table.parameters.size(); ++i) {
    const Parameter& p = table.parameters[i];
    const ParameterId id(static_cast<int32_t>(i));
    plan.transfers.push_back({id, placement.owner[i], Pieces(p, mesh)});
    plan.parameters[p.boundary.index()].push_back(id);
    std::vector<SlotId>& owners = plan.owners[p.boundary.index()];
    if (std::find(owners.begin(), owners.end(), placement.owner[i]) == owners.end()) {
      owners.push_back(placement.owner[i]);
    }
  }
  for (const std::vector<ParameterId>& of_boundary : plan.parameters) {
    for (ParameterId p : of_boundary) plan.owned[placement.owner[p.index()].index()].push_back(p);
  }
  return plan;
}

}  // namespace dmuon::server
