// The configuration file: one YAML mapping of keys to scalars or lists of scalars, read strictly.
#ifndef DMUON_SERVER_DAEMON_CONFIG_FILE_H_
#define DMUON_SERVER_DAEMON_CONFIG_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/daemon/config_value.h"

namespace dmuon::server {

struct FileSetting {
  std::string key;
  ConfigText text;
  int line = 0;  // of the key, from 1
};

// In the order of the file. `name` is what errors call it: "dmuond.yaml:7: ...". INVALID_ARGUMENT for what is not such
// a mapping, a key that comes twice, more than 64 KiB, or anything nested deeper.
absl::StatusOr<std::vector<FileSetting>> ParseConfigFile(absl::string_view text,
                                                         absl::string_view name);

// Reads and parses. NOT_FOUND, PERMISSION_DENIED and so on when it cannot be read.
absl::StatusOr<std::vector<FileSetting>> ReadConfigFile(const std::string& path);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_CONFIG_FILE_H_
