// The keys of the configuration, with default and meaning. deploy/dmuond.yaml says the same at more length.
#ifndef DMUON_SERVER_DAEMON_CONFIG_KEYS_H_
#define DMUON_SERVER_DAEMON_CONFIG_KEYS_H_

#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dmuon::server {

struct ConfigKey {
  absl::string_view name;      // the field of dmuon.config.v1.Config
  absl::string_view fallback;  // as one would write it; lists are separated by commas
  absl::string_view help;
};

// In the order of the message; one for each of its fields.
absl::Span<const ConfigKey> ConfigKeys();

std::string EnvironmentName(absl::string_view key);  // socket_dir -> DMUOND_SOCKET_DIR
std::string FlagName(absl::string_view key);         // socket_dir -> --socket-dir

// The name in `names` that is nearest to `given` by edit distance, when it is near enough to have been meant; "" else.
std::string NearestName(absl::string_view given, absl::Span<const std::string> names);

// " (did you mean 'threads'?)" for a key that is unknown; "" when none is near.
std::string DidYouMean(absl::string_view given);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_CONFIG_KEYS_H_
