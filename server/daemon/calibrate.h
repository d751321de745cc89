// `dmuond --calibrate`, and what a starting daemon makes of its result.
#ifndef DMUON_SERVER_DAEMON_CALIBRATE_H_
#define DMUON_SERVER_DAEMON_CALIBRATE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dmuon/config/v1/config.pb.h"
#include "kernels/newton_schulz/calibrate.h"
#include "kernels/ops/backend.h"
#include "server/daemon/calibration_file.h"

namespace dmuon::server {

// Measures, prints the table on stdout and progress on stderr, and writes calibration_file. What can be known of the
// file without writing it is known before measuring. CANCELLED, with the file as it was, when a signal comes on
// `signals` (a signalfd). FAILED_PRECONDITION when calibration_file is "".
absl::Status RunCalibration(const config::v1::Config& config, int signals,
                            const kernels::CalibrationPlan& plan = {});

// The table as --calibrate prints it: shape, milliseconds of both forms, which of them will run.
std::string CalibrationText(const std::vector<kernels::CalibrationPoint>& points,
                            std::shared_ptr<const kernels::CostTable> costs);

// What placement and forms go by.
struct CostSource {
  std::shared_ptr<const kernels::CostTable> table;  // null: FLOPs
  std::string text;                                 // which of the two and why, in a few words
  bool refused = false;                             // there was a file, and it was not taken
};

// Never fails: whatever is wrong with the file is why FLOPs are taken.
CostSource LoadCosts(const std::string& file, kernels::Backend& backend, int threads);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_CALIBRATE_H_
