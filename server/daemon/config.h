// The daemon's configuration: default < file < environment < flag, and where each value came from.
#ifndef DMUON_SERVER_DAEMON_CONFIG_H_
#define DMUON_SERVER_DAEMON_CONFIG_H_

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dmuon/config/v1/config.pb.h"

namespace dmuon::server {

struct ConfigSources {
  std::string file;                                        // path; "" = none
  std::map<std::string, std::string> environment;          // all of it: only DMUOND_<KEY> is read
  std::vector<std::pair<std::string, std::string>> flags;  // key and text, in the order given
};

struct LoadedConfig {
  config::v1::Config config;
  std::map<std::string, std::string>
      origin;  // by key: "default", "dmuond.yaml:7", "env DMUOND_THREADS", "flag"
  std::vector<std::string> warnings;  // what looks like a slip of the pen
};

// INVALID_ARGUMENT for what is wrong, with file and line, variable or flag, the key, the expected and the given;
// UNIMPLEMENTED, with the key, for what is refused for now.
absl::StatusOr<LoadedConfig> LoadConfig(const ConfigSources& sources);

// Each value with its origin, as YAML that can be read again.
std::string PrintConfig(const LoadedConfig& loaded);

// The number that `socket_mode` writes in octal. REQUIRES: the configuration was loaded.
unsigned SocketMode(const config::v1::Config& config);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_CONFIG_H_
