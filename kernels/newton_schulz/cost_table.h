// What Newton-Schulz and the vector work cost on one machine, as measured: a value that is carried, never a global.
//
// Everything that is concluded from a table is a pure function of it, so that one table gives one form for a block and
// one placement, wherever and whenever it is asked.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_COST_TABLE_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_COST_TABLE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::kernels {

// FLOPs of `form` (symmetric products at half cost, docs/numerics.md) divided by the seconds that it took.
struct FormRates {
  double direct = 0;
  double gram = 0;
};

// Rates for one choice of the iteration dtype, on a grid of smaller sides m and aspects n / m.
struct CostSeries {
  std::vector<std::optional<Dtype>> asked;  // choices that run this; nullopt: none was made
  std::vector<int64_t> sides;               // ascending
  std::vector<double> aspects;              // ascending, from 1 on
  std::vector<FormRates> rates;             // of sides[i] and aspects[j] at i * aspects.size() + j
};

struct CostTable {
  std::vector<CostSeries> series;
  double bytes_per_second = 0;  // of vector operations: what they read and write
};

// INVALID_ARGUMENT, with the field, the expected and the given, for what no measurement gives: rates that are not finite
// and positive, a grid that does not ascend or is larger than any that is made.
absl::Status Check(const CostTable& table);

// The series that `options` run, or null when it was not measured.
const CostSeries* FindSeries(const CostTable& table, const NewtonSchulzOptions& options);

// Seconds of `form` on a rows x cols block: its FLOPs at a rate that is interpolated between the points of the grid
// (linear in the logarithms of m and n / m), and that of the nearest point beyond it. Sides below the grid count as its
// smallest: kernels work in tiles, and fill them up.
double Seconds(const CostSeries& series, NsForm form, const NewtonSchulzOptions& options,
               int64_t rows, int64_t cols);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_COST_TABLE_H_
