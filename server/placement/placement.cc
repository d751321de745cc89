#include "server/placement/placement.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kernels/newton_schulz/cost_table.h"
#include "kernels/newton_schulz/form.h"

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

double Sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

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

ParameterCosts Costs(const ParameterTable& table, const kernels::NewtonSchulzOptions& options) {
  const kernels::CostSeries* series =
      options.costs ? kernels::FindSeries(*options.costs, options) : nullptr;
  const double byte = series ? 1 / options.costs->bytes_per_second : kFlopsPerByte;
  const auto block_cost = [&](int64_t rows, int64_t cols) {
    if (series == nullptr) return kernels::Flops(options, rows, cols);
    return kernels::Seconds(*series, kernels::ChooseForm(options, rows, cols), options, rows, cols);
  };
  ParameterCosts costs{series != nullptr, {}};
  costs.each.reserve(table.parameters.size());
  for (const Parameter& p : table.parameters) {
    const double numel = static_cast<double>(p.numel());
    double cost = byte * numel * (p.route == Route::kMuon ? kMuonBytes : kAdamwBytes);
    if (p.route == Route::kMuon) {
      const int64_t cols = AsMatrix(p).cols;
      for (const Block& b : p.blocks) cost += block_cost(b.row_end - b.row_begin, cols);
    }
    costs.each.push_back(cost);
  }
  return costs;
}

Placement Place(const ParameterTable& table, const Mesh& mesh, ParameterCosts costs) {
  const int slots = mesh.world_size();
  const double mean = Sum(costs.each) / slots;
  std::vector<double> load(slots, 0);

  // How many units of a boundary a slot already has: among equally loaded slots the fewest wins, so that one
  // boundary's update is spread.
  absl::flat_hash_map<std::pair<BoundaryId, int>, int> share;
  const std::vector<Unit> units = MakeUnits(table, costs.each, mean);
  std::vector<int> slot_of(units.size());
  for (size_t u = 0; u < units.size(); ++u) {
    const auto count = [&](int s) {
      const auto it = share.find({units[u].boundary, s});
      return it == share.end() ? 0 : it->second;
    };
    int best = 0;
    for (int s = 1; s < slots; ++s) {
      const double difference = load[s] - load[best];
      if (difference < -1e-9 * mean || (difference < 1e-9 * mean && count(s) < count(best)))
        best = s;
    }
    load[best] += units[u].cost;
    ++share[{units[u].boundary, best}];
    slot_of[u] = best;
  }
  Even(units, LowerBound(costs.each, static_cast<size_t>(slots), mean), slot_of, load);

  Placement out;
  out.owner.resize(costs.each.size());
  out.load.resize(slots);
  for (size_t u = 0; u < units.size(); ++u) {
    for (ParameterId p : units[u].members) out.owner[p.index()] = SlotId(slot_of[u]);
  }
  Weigh(out, std::move(costs));
  return out;
}

void Weigh(Placement& placement, ParameterCosts costs) {
  const size_t slots = placement.load.size();
  placement.load.assign(slots, 0);
  for (size_t p = 0; p < costs.each.size(); ++p) {
    placement.load[placement.owner[p].index()] += costs.each[p];
  }
  const double mean = Sum(costs.each) / static_cast<double>(slots);
  placement.lower_bound = LowerBound(costs.each, slots, mean);
  placement.imbalance =
      mean > 0 ? *std::max_element(placement.load.begin(), placement.load.end()) / mean : 1;
  placement.cost = std::move(costs.each);
  placement.measured = costs.measured;
}

}  // namespace dmuon::server
