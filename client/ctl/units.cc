#include "client/ctl/units.h"

#include <cmath>

#include "absl/strings/str_format.h"
#include "absl/types/span.h"

namespace dmuon::ctl {
namespace {

// Three significant digits. 999.9 would be printed as 1000, so the next unit begins a little below `base`.
std::string Scaled(double value, double base, absl::Span<const char* const> units) {
  if (!std::isfinite(value)) return absl::StrFormat("%g", value);
  size_t unit = 0;
  while (std::fabs(value) >= base - 0.5 && unit + 1 < units.size()) {
    value /= base;
    ++unit;
  }
  const double magnitude = std::fabs(value);
  const int decimals = magnitude < 9.995 ? 2 : magnitude < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f %s", decimals, value, units[unit]);
}

}  // namespace

std::string HumanBytes(double bytes) {
  if (bytes < 1023.5) return absl::StrFormat("%.0f B", bytes);
  return Scaled(bytes / 1024, 1024, {"KiB", "MiB", "GiB", "TiB", "PiB"});
}

std::string HumanFlops(double flops) {
  if (flops < 999.5) return absl::StrFormat("%.0f FLOP", flops);
  return Scaled(flops / 1000, 1000, {"kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"});
}

std::string HumanSeconds(double seconds) {
  if (seconds == 0) return "0 s";
  return Scaled(seconds * 1e9, 1000, {"ns", "us", "ms", "s"});
}

}  // namespace dmuon::ctl
