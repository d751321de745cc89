#include "server/placement/placement.h"

#include <algorithm>
#include <functional>
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

// No placement has a smaller largest load. Besides the mean: of the k * slots + 1 largest parameters some slot has
// k + 1, so at least the k + 1 smallest of them.
double LowerBound(std::vector<double> costs, size_t slots, double mean) {
  std::sort(costs.begin(), costs.end(), std::greater<>());
  double bound = mean;
  for (size_t k = 0; k * slots < costs.size(); ++k) {
    const auto end = costs.begin() + static_cast<int64_t>(k * slots + 1);
    bound = std::max(bound, std::accumulate(end - static_cast<int64_t>(k + 1), end, 0.0));
  }
  return bound;
}

// Longest first can leave the fullest slot a little too full. Exchanges one of its units with a smaller one elsewhere (or
// with none) as long as that lowers the largest load, the best exchange first. Bounded: each round is
// units x slots, and a handful settles the models that were tried.
void Even(const std::vector<Unit>& units, double bound, std::vector<int>& slot_of,
          std::vector<double>& load) {
  constexpr int kMostRounds = 64;
  constexpr double kGoodEnough = 1.001;
  for (int round = 0; round < kMostRounds; ++round) {
    const int full = static_cast<int>(std::max_element(load.begin(), load.end()) - load.begin());
    if (load[full] <= kGoodEnough * bound) return;
    double best = load[full];
    int out = -1, in = -1, other = -1;
    const auto consider = [&](int u, int v, int s, double difference) {
      const double larger = std::max(load[full] - difference, load[s] + difference);
      if (difference > 0 && larger < best) best = larger, out = u, in = v, other = s;
    };
    for (int u = 0; u < static_cast<int>(units.size()); ++u) {
      if (slot_of[u] != full) continue;
      for (int s = 0; s < static_cast<int>(load.size()); ++s) {
        if (s != full) consider(u, -1, s, units[u].cost);
      }
      for (int v = 0; v < static_cast<int>(units.size()); ++v) {
        if (slot_of[v] != full) consider(u, v, slot_of[v], units[u].cost - units[v].cost);
      }
    }
    if (out < 0) return;
    const double difference = units[out].cost - (in < 0 ? 0 : units[in].cost);
    load[full] -= difference;
    load[other] += difference;
    slot_of[out] = other;
    if (in >= 0) slot_of[in] = full;
  }
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
  const std::vector<Unit> units = MakeUnits(table, costs, mean);
  std::vector<int> slot_of(units.size());
  for (size_t u = 0; u < units.size(); ++u) {
    const auto count = [&](int s) {
      const auto it = share.find({units[u].boundary, s});
      return it == share.end() ? 0 : it->second;
    };
    int best = 0;
    for (int s = 1; s < slots; ++s) {
      const double difference = out.load[s] - out.load[best];
      if (difference < -1e-9 * mean || (difference < 1e-9 * mean && count(s) < count(best)))
        best = s;
    }
    out.load[best] += units[u].cost;
    ++share[{units[u].boundary, best}];
    slot_of[u] = best;
  }
  out.lower_bound = LowerBound(costs, static_cast<size_t>(slots), mean);
  Even(units, out.lower_bound, slot_of, out.load);
  for (size_t u = 0; u < units.size(); ++u) {
    for (ParameterId p : units[u].members) out.owner[p.index()] = SlotId(slot_of[u]);
  }

  const double largest_load = *std::max_element(out.load.begin(), out.load.end());
  out.imbalance = total > 0 ? largest_load / mean : 1;
  return out;
}

}  // namespace dmuon::server
