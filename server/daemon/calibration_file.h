// The cached result of `dmuond --calibrate`: written whole or not at all, read with distrust.
#ifndef DMUON_SERVER_DAEMON_CALIBRATION_FILE_H_
#define DMUON_SERVER_DAEMON_CALIBRATION_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/newton_schulz/cost_table.h"
#include "kernels/ops/backend.h"
#include "server/daemon/replaced_file.h"

namespace dmuon::server {

// What a calibration belongs to, and nothing else.
struct CalibratedMachine {
  std::string backend;  // "cpu"
  std::string device;   // the processor, or what the backend says of itself
  std::string kernel;   // what a block in the default dtype runs on
  int threads = 0;
};

// Of this process: `threads` as the backend was made with.
absl::StatusOr<CalibratedMachine> DescribeMachine(kernels::Backend& backend, int threads);

struct Calibration {
  CalibratedMachine machine;
  absl::Time measured;
  kernels::CostTable costs;
};

// The place of a calibration that is yet to be measured; an error here is known before it takes its time.
absl::StatusOr<ReplacedFile> OpenCalibration(const std::string& path);
absl::Status WriteCalibration(ReplacedFile& file, const Calibration& calibration);

// NOT_FOUND: there is none. FAILED_PRECONDITION: of another machine, kernel, number of threads or version, both named.
// INVALID_ARGUMENT: damaged, too large, or not a calibration at all. Else what the system said.
// One line of UTF-8, whatever the file holds.
absl::StatusOr<Calibration> ReadCalibration(const std::string& path,
                                            const CalibratedMachine& machine);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_CALIBRATION_FILE_H_
