#include "server/daemon/calibrate.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "kernels/newton_schulz/form.h"
#include "server/daemon/cores.h"

namespace dmuon::server {
namespace {

std::string Name(std::optional<Dtype> dtype) {
  return dtype.has_value() ? std::string(dmuon::Name(*dtype)) : "default";
}

bool SignalCame(int signals) {
  signalfd_siginfo signal;
  return read(signals, &signal, sizeof(signal)) == sizeof(signal);
}

// One line that is written over, where somebody looks at it.
void ShowProgress(int done, const kernels::CalibrationPoint& point) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r  %d measured; %d x %d, %s        ", done, static_cast<int>(point.rows),
               static_cast<int>(point.cols), Name(point.dtype).c_str());
  std::fflush(stderr);
}

}  // namespace

std::string CalibrationText(const std::vector<kernels::CalibrationPoint>& points,
                            std::shared_ptr<const kernels::CostTable> costs) {
  std::string text = absl::StrFormat("%8s  %13s  %10s  %10s  %s\n", "dtype", "shape", "direct ms",
                                     "gram ms", "runs");
  kernels::NewtonSchulzOptions options;
  options.costs = std::move(costs);
  for (const kernels::CalibrationPoint& p : points) {
    options.iteration_dtype = p.dtype;
    const bool gram = kernels::ChooseForm(options, p.rows, p.cols) == kernels::NsForm::kGram;
    absl::StrAppendFormat(&text, "%8s  %13s  %10.3f  %10.3f  %s\n", Name(p.dtype),
                          absl::StrCat(p.rows, " x ", p.cols), 1e3 * p.direct_seconds,
                          1e3 * p.gram_seconds, gram ? "gram" : "direct");
  }
  return absl::StrCat(
      text, absl::StrFormat("vector work: %.1f GB/s\n", 1e-9 * options.costs->bytes_per_second));
}

absl::Status RunCalibration(const config::v1::Config& config, int signals,
                            const kernels::CalibrationPlan& plan) {
  const std::string& path = config.calibration_file();
  if (path.empty()) {
    return absl::FailedPreconditionError(
        "calibration_file: expected the path of a file to write, given \"\"");
  }
  ASSIGN_OR_RETURN(ReplacedFile file, OpenCalibration(path));
  const Threads threads = ThreadsFor(static_cast<int>(config.threads()), UsableCores());
  if (!threads.warning.empty()) std::fprintf(stderr, "dmuond: %s\n", threads.warning.c_str());
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Backend> backend,
                   kernels::CreateBackend(config.backend(), threads.count));
  ASSIGN_OR_RETURN(const CalibratedMachine machine, DescribeMachine(*backend, threads.count));
  std::printf("%s; %s; %s\n", machine.device.c_str(), backend->description().c_str(),
              machine.kernel.c_str());
  if (std::fflush(stdout) != 0) return absl::ErrnoToStatus(errno, "writing to standard output");
  std::vector<kernels::CalibrationPoint> points;
  const auto progress = [&](const kernels::CalibrationPoint& point) {
    points.push_back(point);
    ShowProgress(static_cast<int>(points.size()), point);
    return !SignalCame(signals);
  };
  absl::StatusOr<kernels::CostTable> costs = kernels::Calibrate(*backend, plan, progress);
  if (isatty(STDERR_FILENO) != 0) std::fprintf(stderr, "\r%60s\r", "");
  if (!costs.ok()) return costs.status();
  const auto shared = std::make_shared<const kernels::CostTable>(*costs);
  std::fputs(CalibrationText(points, shared).c_str(), stdout);
  RETURN_IF_ERROR(WriteCalibration(file, {machine, absl::Now(), *std::move(costs)}));
  std::printf("written to %s; a daemon takes it at its next start\n", path.c_str());
  return absl::OkStatus();
}

CostSource LoadCosts(const std::string& file, kernels::Backend& backend, int threads) {
  if (file.empty()) return {nullptr, "flops: calibration_file is empty"};
  const absl::StatusOr<CalibratedMachine> machine = DescribeMachine(backend, threads);
  absl::StatusOr<Calibration> calibration =
      machine.ok() ? ReadCalibration(file, *machine) : machine.status();
  if (absl::IsNotFound(calibration.status())) {
    return {nullptr, absl::StrCat("flops: no ", file, "; dmuond --calibrate makes one")};
  }
  if (!calibration.ok()) {
    return {nullptr, absl::StrCat("flops: ", calibration.status().message()), /*refused=*/true};
  }
  return {std::make_shared<const kernels::CostTable>(std::move(calibration->costs)),
          absl::StrCat("measured: ", file, " of ",
                       absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", calibration->measured,
                                        absl::UTCTimeZone()))};
}

}  // namespace dmuon::server
