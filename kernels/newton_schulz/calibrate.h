// Measures a cost table on a backend.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_CALIBRATE_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_CALIBRATE_H_

#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/newton_schulz/cost_table.h"

namespace dmuon::kernels {

struct CalibrationPoint {
  std::optional<Dtype> dtype;  // that was asked for
  int64_t rows = 0, cols = 0;
  double direct_seconds = 0, gram_seconds = 0;
};

struct CalibrationPlan {
  // Both ascending. Side by side, for each aspect; a side whose points would not end, or do not end, in time is left out,
  // but never the first.
  std::vector<int64_t> sides = {32, 64, 128, 256, 512, 1024};
  std::vector<double> aspects = {1, 1.5, 2, 4, 8};
  absl::Duration patience = absl::Seconds(25);  // for all but the run under way
  absl::Duration each =
      absl::Milliseconds(20);  // a point is repeated for so long, and three times at least
};

// Called after each point. False: stop, with CANCELLED.
using CalibrationProgress = std::function<bool(const CalibrationPoint&)>;

// Runs both forms on Gaussian blocks of every shape of the plan: in the backend's own dtype, and in fp32 where that is
// another; and before them the vector work of a step. What was measured is the least of the repeats. Takes the machine as it is:
// whatever else runs on it is in the numbers.
absl::StatusOr<CostTable> Calibrate(Backend& backend, const CalibrationPlan& plan,
                                    const CalibrationProgress& progress);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_CALIBRATE_H_
