#include "kernels/newton_schulz/cost_table.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/newton_schulz/form.h"

namespace dmuon::kernels {
namespace {

constexpr size_t kMostSeries = 8, kMostSteps = 64;  // far above what calibration makes
constexpr double kLargestSide = 1 << 20;
// Rates from a pocket calculator's to a thousand times what any device has.
constexpr double kLeastRate = 1, kMostRate = 1e18;

absl::Status CheckRate(absl::string_view what, double rate) {
  if (rate >= kLeastRate && rate <= kMostRate) return absl::OkStatus();  // false for NaN
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected a number from ", kLeastRate,
                                                 " to ", kMostRate, ", given ", rate));
}

template <typename T>
absl::Status CheckAxis(absl::string_view what, const std::vector<T>& axis) {
  if (axis.empty() || axis.size() > kMostSteps) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": expected 1 to ", kMostSteps, " values, given ", axis.size()));
  }
  for (size_t i = 0; i < axis.size(); ++i) {
    const double value = static_cast<double>(axis[i]), least = i == 0 ? 1 : axis[i - 1];
    const bool rises = i == 0 ? value >= least : value > least;
    if (rises && value <= kLargestSide) continue;
    return absl::InvalidArgumentError(absl::StrCat(what, "[", i, "]: expected a value above ",
                                                   least, ", at most ", kLargestSide, ", given ",
                                                   value));
  }
  return absl::OkStatus();
}

absl::Status CheckSeries(const CostSeries& series) {
  RETURN_IF_ERROR(CheckAxis("sides", series.sides));
  RETURN_IF_ERROR(CheckAxis("aspects", series.aspects));
  if (series.asked.empty() || series.asked.size() > kMostSeries) {
    return absl::InvalidArgumentError(
        absl::StrCat("asked: expected 1 to ", kMostSeries, " dtypes, given ", series.asked.size()));
  }
  if (series.rates.size() != series.sides.size() * series.aspects.size()) {
    return absl::InvalidArgumentError(absl::StrCat("rates: expected ", series.sides.size(), " x ",
                                                   series.aspects.size(), ", given ",
                                                   series.rates.size()));
  }
  for (const FormRates& rate : series.rates) {
    RETURN_IF_ERROR(CheckRate("rates: direct", rate.direct));
    RETURN_IF_ERROR(CheckRate("rates: gram", rate.gram));
  }
  return absl::OkStatus();
}

// Where `value` lies on the axis: between steps `below` and `below + 1`, `part` of the way; at an end beyond it.
struct Place {
  size_t below = 0;
  double part = 0;
};

template <typename T>
Place PlaceOn(const std::vector<T>& axis, double value) {
  if (value <= static_cast<double>(axis.front())) return {};
  if (value >= static_cast<double>(axis.back())) return {axis.size() - 1, 0};
  const size_t above = std::upper_bound(axis.begin(), axis.end(), value) - axis.begin();
  const double from = std::log(static_cast<double>(axis[above - 1])),
               to = std::log(static_cast<double>(axis[above]));
  return {above - 1, (std::log(value) - from) / (to - from)};
}

double RateAt(const CostSeries& series, NsForm form, double m, double aspect) {
  const Place row = PlaceOn(series.sides, m), col = PlaceOn(series.aspects, aspect);
  const auto at = [&](size_t i, size_t j) {
    const FormRates& rates =
        series.rates[std::min(i, series.sides.size() - 1) * series.aspects.size() +
                     std::min(j, series.aspects.size() - 1)];
    return form == NsForm::kGram ? rates.gram : rates.direct;
  };
  const auto across = [&](size_t i) {
    return at(i, col.below) + col.part * (at(i, col.below + 1) - at(i, col.below));
  };
  return across(row.below) + row.part * (across(row.below + 1) - across(row.below));
}

}  // namespace

absl::Status Check(const CostTable& table) {
  RETURN_IF_ERROR(CheckRate("bytes_per_second", table.bytes_per_second));
  if (table.series.empty() || table.series.size() > kMostSeries) {
    return absl::InvalidArgumentError(
        absl::StrCat("series: expected 1 to ", kMostSeries, ", given ", table.series.size()));
  }
  for (const CostSeries& series : table.series) RETURN_IF_ERROR(CheckSeries(series));
  return absl::OkStatus();
}

const CostSeries* FindSeries(const CostTable& table, const NewtonSchulzOptions& options) {
  if (options.tf32) return nullptr;  // not calibrated
  const std::optional<Dtype> asked =
      options.deterministic ? std::optional(Dtype::kF32) : options.iteration_dtype;
  for (const CostSeries& series : table.series) {
    if (std::find(series.asked.begin(), series.asked.end(), asked) != series.asked.end()) {
      return &series;
    }
  }
  return nullptr;
}

double Seconds(const CostSeries& series, NsForm form, const NewtonSchulzOptions& options,
               int64_t rows, int64_t cols) {
  rows = std::max(rows, series.sides.front());
  cols = std::max(cols, series.sides.front());
  const double m = static_cast<double>(std::min(rows, cols)),
               n = static_cast<double>(std::max(rows, cols));
  // As the rates were made: whatever the dtype does to the restarts is in the time that was measured.
  NewtonSchulzOptions as_measured = options;
  as_measured.iteration_dtype.reset();
  return FlopsOfForm(form, as_measured, rows, cols) / RateAt(series, form, m, n / m);
}

}  // namespace dmuon::kernels
