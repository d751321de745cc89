#include "kernels/newton_schulz/coefficients.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace dmuon::kernels {
namespace {

// Polar Express before safety, as published.
constexpr Coefficients kPolarExpressBare[] = {
    {8.28721201814563, -23.595886519098837, 17.300387312530933},
    {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
    {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
    {3.3184196573706015, -2.488488024314874, 0.51004894012372},
    {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
};

constexpr Coefficients kYou[] = {
    {4.0848, -6.8946, 2.9270}, {3.9505, -6.3029, 2.6377}, {3.7418, -5.5913, 2.3037},
    {2.8769, -3.1427, 1.2046}, {2.8366, -3.0525, 1.2012},
};

constexpr Coefficients kJordan[] = {
    {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315},
    {3.4445, -4.7750, 2.0315}, {3.4445, -4.7750, 2.0315},
};

constexpr double kSafety = 1.05;
constexpr int kGrid = 20000;

}  // namespace

absl::Span<const Coefficients> PolarExpress() {
  static const auto* const set = [] {
    auto* made =
        new std::vector<Coefficients>(std::begin(kPolarExpressBare), std::end(kPolarExpressBare));
    for (Coefficients& step : *made) {
      step[0] /= kSafety;
      step[1] /= kSafety * kSafety * kSafety;
      step[2] /= kSafety * kSafety * kSafety * kSafety * kSafety;
    }
    return made;
  }();
  return *set;
}

absl::Span<const Coefficients> You() { return kYou; }
absl::Span<const Coefficients> Jordan() { return kJordan; }

std::vector<Coefficients> Schedule(const NewtonSchulzOptions& options) {
  absl::Span<const Coefficients> set = PolarExpress();
  if (!options.coefficients.empty()) set = options.coefficients;
  std::vector<Coefficients> schedule;
  for (int i = 0; i < options.steps; ++i) {
    schedule.push_back(set[std::min<size_t>(i, set.size() - 1)]);
  }
  return schedule;
}

double Evaluate(absl::Span<const Coefficients> schedule, double singular_value) {
  double x = singular_value;
  for (const auto& [a, b, c] : schedule) {
    const double x2 = x * x;
    x *= a + x2 * (b + x2 * c);
  }
  return x;
}

double Maximum(absl::Span<const Coefficients> schedule) {
  double maximum = 0;
  for (int i = 0; i <= kGrid; ++i) {
    maximum = std::max(maximum, Evaluate(schedule, static_cast<double>(i) / kGrid));
  }
  return maximum;
}

double Overshoot(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return 1e-6;
    case Dtype::kF16: return 1e-3;
    case Dtype::kBF16: return 1e-2;
  }
  return 1e-2;
}

absl::Status CheckSchedule(absl::Span<const Coefficients> schedule, Dtype dtype) {
  for (const Coefficients& step : schedule) {
    for (double value : step) {
      if (!std::isfinite(value)) {
        return absl::InvalidArgumentError("a Newton-Schulz coefficient is not finite");
      }
    }
  }
  const double end = 1 + Overshoot(dtype);
  for (int i = 0; i <= kGrid; ++i) {
    const double x = end * i / kGrid;
    const double y = Evaluate(schedule, x);
    if (!(y >= -0.1 && y <= 1.5)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("Newton-Schulz coefficients diverge: singular value %.6g becomes %.6g "
                          "after %d steps in %s, expected "
                          "[-0.1, 1.5]",
                          x, y, schedule.size(), std::string(Name(dtype))));
    }
  }
  return absl::OkStatus();
}

}  // namespace dmuon::kernels
