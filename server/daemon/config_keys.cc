#include "server/daemon/config_keys.h"

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/edit_distance.h"

namespace dmuon::server {
namespace {

constexpr ConfigKey kKeys[] = {
    {"socket_dir", "/run/dmuon", "directory of attach.sock and control.sock"},
    {"socket_mode", "0750", "octal mode of that directory, when the daemon makes it"},
    {"allow_uids", "",
     "uids that may connect besides the daemon's own and root; empty = whoever can open the "
     "sockets"},
    {"admin_uids", "",
     "uids that may drain and see all sessions, besides the daemon's own and root"},
    {"threads", "0", "cores for the kernels; 0 = those of the affinity mask"},
    {"backend", "auto", "auto | cpu | cuda"},
    {"formation_timeout_seconds", "300", "how long a session waits for its ranks"},
    {"step_timeout_seconds", "600", "how long a step waits for a rank"},
    {"exchange_timeout_seconds", "60",
     "how long an exchange by NCCL may take once all ranks take part"},
    {"orphan_ttl_seconds", "0", "how long state outlives its last trainer; only 0 for now"},
    {"drain_timeout_seconds", "60", "how long a drain waits for the steps under way"},
    {"max_sessions", "64", "sessions at once"},
    {"max_session_bytes", "0", "arenas and private memory of one session; 0 = 80 % of the memory"},
    {"log_level", "info", "debug | info | warning | error"},
    {"log_format", "text", "text | json"},
    {"exit_when_idle", "false", "end with the last attachment (a private daemon)"},
    {"listen", "", "host:port for TCP; only empty (off) for now"},
    {"calibration_file", "/var/cache/dmuon/calibration.json",
     "what --calibrate writes and a daemon reads at its start; empty = none"},
};

}  // namespace

absl::Span<const ConfigKey> ConfigKeys() { return kKeys; }

std::string EnvironmentName(absl::string_view key) {
  return absl::StrCat("DMUOND_", absl::AsciiStrToUpper(key));
}

std::string FlagName(absl::string_view key) {
  return absl::StrCat("--", absl::StrReplaceAll(key, {{"_", "-"}}));
}

std::string NearestName(absl::string_view given, absl::Span<const std::string> names) {
  given = given.substr(0, 64);  // a distance costs the product of the lengths
  std::string nearest;
  size_t best = std::max<size_t>(2, given.size() / 3) + 1;
  for (const std::string& name : names) {
    if (const size_t distance = EditDistance(given, name); distance < best) {
      best = distance;
      nearest = name;
    }
  }
  return nearest;
}

std::string DidYouMean(absl::string_view given) {
  std::vector<std::string> names;
  for (const ConfigKey& key : kKeys) names.emplace_back(key.name);
  const std::string nearest = NearestName(given, names);
  return nearest.empty() ? "" : absl::StrCat(" (did you mean '", nearest, "'?)");
}

}  // namespace dmuon::server
