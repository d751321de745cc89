// One value of the configuration as text, whichever way it came: file, environment or flag. By reflection over the
// message, so that a new field is a new key.
#ifndef DMUON_SERVER_DAEMON_CONFIG_VALUE_H_
#define DMUON_SERVER_DAEMON_CONFIG_VALUE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dmuon/config/v1/config.pb.h"

namespace dmuon::server {

// What a key was set to: one text, or for a list any number of them.
struct ConfigText {
  std::vector<std::string> values;
  bool is_list = false;
  bool quoted = false;  // a string in YAML by its quotes: no number or boolean
};

// INVALID_ARGUMENT "threads: expected an unsigned integer, given 'four'". REQUIRES: `key` is a field.
absl::Status SetValue(config::v1::Config& config, absl::string_view key, const ConfigText& text);
// From the environment or a flag: a list is separated by commas, and "" is an empty one.
absl::Status SetValue(config::v1::Config& config, absl::string_view key, absl::string_view text);

bool IsConfigKey(absl::string_view key);
bool IsBool(absl::string_view key);

// For messages: what was given can be anything, a terminal shows it, and it can be long.
std::string Escaped(absl::string_view given);

// As YAML; what SetValue takes back.
std::string ValueText(const config::v1::Config& config, absl::string_view key);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_CONFIG_VALUE_H_
