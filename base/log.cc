#include "base/log.h"

#include <unistd.h>

#include <atomic>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dmuon {
namespace {

std::atomic<LogLevel> g_minimum{LogLevel::kInfo};
std::atomic<LogFormat> g_format{LogFormat::kText};

absl::string_view Name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
  }
  return "error";
}

// JSON has no \x escapes: control bytes become \u00XX, quotes and backslashes are escaped.
std::string JsonString(absl::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", absl::string_view(&c, 1));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppend(&out, "\\u00", absl::Hex(static_cast<unsigned char>(c), absl::kZeroPad2));
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

bool NeedsQuotes(absl::string_view value) {
  return value.empty() || value.find_first_of(" \"=\n\t") != absl::string_view::npos;
}

}  // namespace

void SetLogLevel(LogLevel minimum) { g_minimum = minimum; }
void SetLogFormat(LogFormat format) { g_format = format; }

void Log(LogLevel level, absl::string_view event, const std::vector<LogField>& fields) {
  if (level < g_minimum.load(std::memory_order_relaxed)) return;
  const std::string now =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  std::string line;
  if (g_format.load(std::memory_order_relaxed) == LogFormat::kJson) {
    absl::StrAppend(&line, "{\"ts\":", JsonString(now), ",\"level\":", JsonString(Name(level)),
                    ",\"event\":", JsonString(event));
    for (const LogField& f : fields) {
      absl::StrAppend(&line, ",", JsonString(f.key), ":", JsonString(f.value));
    }
    line += "}\n";
  } else {
    absl::StrAppend(&line, now, " ", Name(level), " ", event);
    for (const LogField& f : fields) {
      absl::StrAppend(&line, " ", f.key, "=");
      if (NeedsQuotes(f.value)) {
        line += JsonString(f.value);
      } else {
        line += f.value;
      }
    }
    line += "\n";
  }
  [[maybe_unused]] ssize_t n = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace dmuon
