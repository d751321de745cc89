#include "server/daemon/config.h"

#include <sys/un.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "kernels/ops/backend.h"
#include "server/daemon/config_file.h"
#include "server/daemon/config_keys.h"
#include "server/daemon/config_value.h"

namespace dmuon::server {
namespace {

using config::v1::Config;

constexpr double kMaxSeconds = 30 * 86400.0;
// The address of a unix socket holds 107 bytes; the longest name in the directory is "/control.sock".
constexpr size_t kMaxSocketDirBytes = sizeof(sockaddr_un::sun_path) - sizeof("/control.sock");

absl::Status ApplyFile(const std::string& path, LoadedConfig& loaded) {
  absl::StatusOr<std::vector<FileSetting>> settings = ReadConfigFile(path);
  if (!settings.ok()) return settings.status();
  for (const FileSetting& setting : *settings) {
    const std::string where = absl::StrCat(path, ":", setting.line);
    if (!IsConfigKey(setting.key)) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": unknown key '", Escaped(setting.key),
                                                     "'", DidYouMean(setting.key)));
    }
    RETURN_IF_ERROR(Annotate(SetValue(loaded.config, setting.key, setting.text), where));
    loaded.origin[setting.key] = where;
  }
  return absl::OkStatus();
}

absl::Status ApplyEnvironment(const std::map<std::string, std::string>& environment,
                              LoadedConfig& loaded) {
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string name = EnvironmentName(key.name);
    const auto it = environment.find(name);
    if (it == environment.end()) continue;
    const std::string where = absl::StrCat("env ", name);
    RETURN_IF_ERROR(Annotate(SetValue(loaded.config, key.name, it->second), where));
    loaded.origin[std::string(key.name)] = where;
  }
  // Unknown ones are no error: Kubernetes puts DMUOND_SERVICE_HOST and the like there for a service of that name.
  for (const auto& [name, value] : environment) {
    if (!absl::StartsWith(name, "DMUOND_")) continue;
    const std::string key = absl::AsciiStrToLower(absl::StripPrefix(name, "DMUOND_"));
    if (const std::string hint = IsConfigKey(key) ? "" : DidYouMean(key); !hint.empty()) {
      loaded.warnings.push_back(
          absl::StrCat("env ", name, " is no key of the configuration", hint));
    }
  }
  return absl::OkStatus();
}

absl::Status ApplyFlags(const std::vector<std::pair<std::string, std::string>>& flags,
                        LoadedConfig& loaded) {
  for (const auto& [key, text] : flags) {
    RETURN_IF_ERROR(
        Annotate(SetValue(loaded.config, key, text), absl::StrCat("flag ", FlagName(key))));
    loaded.origin[key] = "flag";
  }
  return absl::OkStatus();
}

// --- what the values mean --------------------------------------------------------------------------------------------

// Errors name the key and where its value came from.
class Checker {
 public:
  explicit Checker(const LoadedConfig& loaded) : loaded_(loaded) {}

  absl::Status Expect(bool good, absl::string_view key, absl::string_view expected) const {
    if (good) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(Where(key), key, ": expected ", expected, ", given ", Given(key)));
  }
  // Paths go into logs and answers, which are UTF-8 and have lines; at a zero the system would cut them.
  absl::Status Path(const std::string& value, absl::string_view key) const {
    const bool controlled = std::any_of(value.begin(), value.end(), absl::ascii_iscntrl);
    return Expect(IsUtf8(value) && !controlled, key, "UTF-8 without control characters");
  }
  absl::Status Refuse(bool refused, absl::string_view key, absl::string_view why) const {
    if (!refused) return absl::OkStatus();
    return absl::UnimplementedError(
        absl::StrCat(Where(key), key, ": ", Given(key), " is not built yet: ", why));
  }
  absl::Status OneOf(const std::string& value, absl::string_view key,
                     absl::Span<const absl::string_view> known) const {
    const bool good = std::find(known.begin(), known.end(), value) != known.end();
    return Expect(good, key, absl::StrJoin(known, " or "));
  }
  absl::Status Seconds(double value, absl::string_view key, bool zero_allowed) const {
    const bool good = (zero_allowed ? value >= 0 : value > 0) && value <= kMaxSeconds;
    return Expect(good, key,
                  absl::StrCat("seconds ", zero_allowed ? ">= 0" : "> 0", " and at most 30 days"));
  }

 private:
  std::string Where(absl::string_view key) const {
    const std::string& origin = loaded_.origin.at(std::string(key));
    if (origin == "default") return "";
    return origin == "flag" ? absl::StrCat("flag ", FlagName(key), ": ")
                            : absl::StrCat(origin, ": ");
  }
  std::string Given(absl::string_view key) const { return ValueText(loaded_.config, key); }

  const LoadedConfig& loaded_;
};

bool IsMode(const std::string& text) {
  return !text.empty() && text.size() <= 4 &&
         text.find_first_not_of("01234567") == std::string::npos;
}

absl::Status Check(const LoadedConfig& loaded) {
  const Config& c = loaded.config;
  const Checker check(loaded);
  RETURN_IF_ERROR(
      check.Expect(absl::StartsWith(c.socket_dir(), "/"), "socket_dir", "an absolute path"));
  RETURN_IF_ERROR(check.Path(c.socket_dir(), "socket_dir"));
  RETURN_IF_ERROR(check.Path(c.calibration_file(), "calibration_file"));
  RETURN_IF_ERROR(check.Expect(c.socket_dir().size() <= kMaxSocketDirBytes, "socket_dir",
                               absl::StrCat("at most ", kMaxSocketDirBytes, " bytes")));
  RETURN_IF_ERROR(
      check.Expect(IsMode(c.socket_mode()) && (SocketMode(c) & 0702) == 0700, "socket_mode",
                   "an octal mode like 0750, all for the owner and no writing for others"));
  RETURN_IF_ERROR(check.Expect(c.threads() <= 4096, "threads", "at most 4096"));
  RETURN_IF_ERROR(check.OneOf(c.backend(), "backend", {"auto", "cpu", "cuda"}));
  RETURN_IF_ERROR(check.Seconds(c.formation_timeout_seconds(), "formation_timeout_seconds", false));
  RETURN_IF_ERROR(check.Seconds(c.step_timeout_seconds(), "step_timeout_seconds", false));
  RETURN_IF_ERROR(check.Seconds(c.exchange_timeout_seconds(), "exchange_timeout_seconds", false));
  RETURN_IF_ERROR(check.Seconds(c.orphan_ttl_seconds(), "orphan_ttl_seconds", true));
  RETURN_IF_ERROR(check.Refuse(c.orphan_ttl_seconds() != 0, "orphan_ttl_seconds",
                               "state goes with its last trainer, so only 0 is there"));
  RETURN_IF_ERROR(check.Seconds(c.drain_timeout_seconds(), "drain_timeout_seconds", true));
  RETURN_IF_ERROR(check.Expect(c.max_sessions() >= 1 && c.max_sessions() <= 65536, "max_sessions",
                               "1 to 65536"));
  RETURN_IF_ERROR(check.OneOf(c.log_level(), "log_level", {"debug", "info", "warning", "error"}));
  RETURN_IF_ERROR(check.OneOf(c.log_format(), "log_format", {"text", "json"}));
  RETURN_IF_ERROR(
      check.Refuse(!c.listen().empty(), "listen", "the daemon answers on its unix sockets only"));
  RETURN_IF_ERROR(
      check.Expect(c.calibration_file().empty() || absl::StartsWith(c.calibration_file(), "/"),
                   "calibration_file", "an absolute path, or nothing"));
  const auto known = kernels::BackendNames();
  if (c.backend() != "auto" && std::find(known.begin(), known.end(), c.backend()) == known.end()) {
    return check.Refuse(true, "backend",
                        absl::StrCat("this dmuond has ", absl::StrJoin(known, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LoadedConfig> LoadConfig(const ConfigSources& sources) {
  LoadedConfig loaded;
  for (const ConfigKey& key : ConfigKeys()) {
    RETURN_IF_ERROR(SetValue(loaded.config, key.name, key.fallback));
    loaded.origin[std::string(key.name)] = "default";
  }
  if (!sources.file.empty()) RETURN_IF_ERROR(ApplyFile(sources.file, loaded));
  RETURN_IF_ERROR(ApplyEnvironment(sources.environment, loaded));
  RETURN_IF_ERROR(ApplyFlags(sources.flags, loaded));
  RETURN_IF_ERROR(Check(loaded));
  return loaded;
}

std::string PrintConfig(const LoadedConfig& loaded) {
  std::vector<std::pair<std::string, std::string>> lines;
  size_t width = 0;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string line = absl::StrCat(key.name, ": ", ValueText(loaded.config, key.name));
    width = std::max(width, line.size());
    lines.emplace_back(line, loaded.origin.at(std::string(key.name)));
  }
  std::string text;
  for (const auto& [line, origin] : lines) {
    absl::StrAppend(&text, line, std::string(width - line.size() + 2, ' '), "# ", origin, "\n");
  }
  return text;
}

unsigned SocketMode(const Config& config) {
  unsigned mode = 0;
  for (char c : config.socket_mode()) mode = mode * 8 + static_cast<unsigned>(c - '0');
  return mode;
}

}  // namespace dmuon::server
