// Structured log: one line an event, "<time> <level> <event> key=value ...", or one JSON object a line.
// Lines go to stderr. A step is never logged; a session event is, once.
#ifndef DMUON_BASE_LOG_H_
#define DMUON_BASE_LOG_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dmuon {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };
enum class LogFormat { kText, kJson };

struct LogField {
  template <typename T>
  LogField(absl::string_view k, const T& v) : key(k), value(absl::StrCat(v)) {}
  std::string key;
  std::string value;
};

// Thread-safe. Set once at start; `kInfo` and `kText` until then.
void SetLogLevel(LogLevel minimum);
void SetLogFormat(LogFormat format);

// `event` is a stable name ("session_ready"); values are data. Thread-safe, one write a line.
void Log(LogLevel level, absl::string_view event, const std::vector<LogField>& fields = {});

}  // namespace dmuon

#endif  // DMUON_BASE_LOG_H_
