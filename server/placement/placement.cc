#include "server/placement/placement.h"

#include <algorithm>
#include <numeric>

#include "absl/container/flat_hash_map.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::server {
namespace {

// A core multiplies about this many numbers in the time that it moves one byte; the default until a machine is
// calibrated.
constexpr double kFlopsPerByte = 10;
// State and gradient bytes that a route moves for each element: muon reads M, G, W, O and writes M, W, O twice;
// adamw reads W, m, v, G and writes three.
constexpr double kMuonBytes = 32;
constexpr double kAdamwBytes = 28;
// Parameters below this share of the mean load travel with their boundary instead of on their own.
constexpr double kSmallShare = 0.001;

// What is assigned as a whole: one parameter, or the small ones of one boundary.
struct Unit {
  double cost = 0;
  BoundaryId boundary;
  std::vector<ParameterId> members;
};

std::vector<Unit> MakeUnits(const ParameterTable& table, const std::vector<double>& costs,
                            double mean_load) {
  std::vector<Unit> units;
  absl::flat_hash_map<BoundaryId, size_t> small;  // boundary -> its unit of small parameters
  for (size_t i = 0; i < costs.size(); ++i) {
    const BoundaryId boundary = table.parameters[i].boundary;
    const ParameterId id(static_cast<int32_t>(i));
    if (costs[i] < kSmallShare * mean_load) {
      const auto [it, fresh] = small.try_emplace(boundary, units.size());
      if (fresh) units.push_back({0, boundary, {}});
      units[it->second].cost += costs[i];
      units[it->second].members.push_back(id);
    } else {
      units.push_back({costs[i], boundary, {id}});
    }
  }
  // Largest first; equal costs keep the order of the table.
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
  return units;
}

}  // namespace

std::vector<double> Costs(const ParameterTable& table) {
  std::vector<double> costs;
  costs.reserve(table.parameters.size());
  const kernels::NewtonSchulzOptions defaults;
  for (const Parameter& p : table.parameters) {
    const double numel = static_cast<double>(p.numel());
    double cost = kFlopsPerByte * numel * (p.route == Route::kMuon ? kMuonBytes : kAdamwBytes);
    if (p.route == Route::kMuon) {
      const int64_t cols = AsMatrix(p).cols;
      for (const Block& b : p.blocks) {
        cost += kernels::Flops(defaults, b.row_end - b.row_begin, cols);
      }
    }
    costs.push_back(cost);
  }
  return costs;
}

Placement Place(const ParameterTable& table, const Mesh& mesh, const std::vector<double>& costs) {
  const int slots = mesh.world_size();
  Placement out;
  out.cost = costs;
  out.owner.resize(costs.size());
  out.load.assign(slots, 0);
  const double total = std::accumulate(costs.begin(), costs.end(), 0.0);
  const double mean = total / slots;

  // How many units of a boundary a slot already has: among equally loaded slots the fewest wins, so that one
  // boundary's update is spread.
  absl::flat_hash_map<std::pair<BoundaryId, int>, int> share;
  for (const Unit& unit : MakeUnits(table, costs, mean)) {
    const auto count = [&](int s) {
      const auto it = share.find({unit.boundary, s});
      return it == share.end() ? 0 : it->second;
    };
    int best = 0;
    for (int s = 1; s < slots; ++s) {
      const double difference = out.load[s] - out.load[best];
      if (difference < -1e-9 * mean || (difference < 1e-9 * mean && count(s) < count(best))) best = s;
    }
    out.load[best] += unit.cost;
    ++share[{unit.boundary, best}];
    for (ParameterId p : unit.members) out.owner[p.index()] = SlotId(best);
  }

  const double largest_load = *std::max_element(out.load.begin(), out.load.end());
  out.imbalance = total > 0 ? largest_load / mean : 1;
  out.lower_bound = std::max(mean, *std::max_element(costs.begin(), costs.end()));
  return out;
}

}  // namespace dmuon::server
