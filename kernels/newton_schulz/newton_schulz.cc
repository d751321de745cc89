#include "kernels/newton_schulz/newton_schulz.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "kernels/newton_schulz/coefficients.h"
#include "kernels/newton_schulz/restarts.h"

namespace dmuon::kernels {
namespace {

constexpr int kMaxSteps = 100;

// A client may have scaled its set in another order of operations.
bool Same(const Coefficients& a, const Coefficients& b) {
  constexpr double kRounding = 1e-12;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::abs(a[i] - b[i]) > kRounding * std::abs(b[i])) return false;
  }
  return true;
}

bool IsPublished(absl::Span<const Coefficients> set) {
  for (absl::Span<const Coefficients> known : {PolarExpress(), You(), Jordan()}) {
    if (set.size() <= known.size() && std::equal(set.begin(), set.end(), known.begin(), Same))
      return true;
  }
  return false;
}

// A published set that is cut short peaks above 1.5, by design of its authors: worth one line, not an error.
void WarnOnceAboutPeak(double maximum, int steps) {
  static std::atomic<bool> warned{false};
  if (maximum <= 1.5 || warned.exchange(true)) return;
  Log(LogLevel::kWarning, "newton_schulz_peak",
      {{"steps", steps}, {"largest_singular_value", maximum}});
}

}  // namespace

absl::Status Validate(const NewtonSchulzOptions& options) {
  if (options.steps < 1 || options.steps >= kMaxSteps) {
    return absl::InvalidArgumentError(absl::StrCat("Newton-Schulz steps: expected 1 to ",
                                                   kMaxSteps - 1, ", given ", options.steps));
  }
  if (options.tf32 && (options.deterministic || options.iteration_dtype != Dtype::kF32)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Newton-Schulz tf32: expected with iteration dtype fp32, given ",
                     options.deterministic                 ? "deterministic"
                     : options.iteration_dtype.has_value() ? Name(*options.iteration_dtype)
                                                           : "none"));
  }
  const std::vector<Coefficients> schedule = Schedule(options);
  if (options.coefficients.empty() || IsPublished(options.coefficients)) {
    WarnOnceAboutPeak(Maximum(schedule), options.steps);
  } else {
    // Without a dtype the backend chooses, and bf16 is the least forgiving of its choices.
    RETURN_IF_ERROR(CheckSchedule(
        schedule, RestartDtype(options, options.iteration_dtype.value_or(Dtype::kBF16))));
  }
  if (options.restarts.has_value()) {
    const Dtype dtype = RestartDtype(options, options.iteration_dtype.value_or(Dtype::kF32));
    RETURN_IF_ERROR(CheckRestarts(schedule, *options.restarts, dtype));
  }
  return absl::OkStatus();
}

namespace {

absl::Status Check(const NewtonSchulzOptions& options, int64_t rows, int64_t cols) {
  RETURN_IF_ERROR(Validate(options));
  if (rows >= 1 && cols >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("Newton-Schulz shape: expected at least 1 x 1, given ", rows, " x ", cols));
}

}  // namespace

void NewtonSchulz::RunBatch(Stream stream, const NewtonSchulzBatch& batch) const {
  for (const int64_t offset : batch.offsets)
    Run(stream, batch.in + offset, batch.out + offset, batch.workspace);
}

absl::StatusOr<std::unique_ptr<NewtonSchulz>> PlanNewtonSchulz(Backend& backend,
                                                               const NewtonSchulzOptions& options,
                                                               int64_t rows, int64_t cols,
                                                               int64_t blocks) {
  RETURN_IF_ERROR(Check(options, rows, cols));
  return backend.MakeNewtonSchulz(options, rows, cols, blocks);
}

absl::StatusOr<NewtonSchulzMemory> PlanMemory(const Backend& backend,
                                              const NewtonSchulzOptions& options, int64_t rows,
                                              int64_t cols, int64_t blocks) {
  RETURN_IF_ERROR(Check(options, rows, cols));
  return backend.MemoryOfNewtonSchulz(options, rows, cols, blocks);
}

}  // namespace dmuon::kernels
