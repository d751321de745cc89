// A file that is written beside the one whose name it takes, so that a reader sees the old one or the new one.
#ifndef DMUON_SERVER_DAEMON_REPLACED_FILE_H_
#define DMUON_SERVER_DAEMON_REPLACED_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace dmuon::server {

// Destruction without Replace leaves everything as it was. A process that is killed leaves the new file, `path`.new, which the
// next one takes over.
class ReplacedFile {
 public:
  // Makes the new file, empty, with room for `bytes`, and the last directory of `path` when it is not there: whoever has
  // one can write it. Where `path` is a symbolic link, what it points at is replaced and the link stays.
  // FAILED_PRECONDITION: there is something else than a regular file, or another process is at it. Else what the system said.
  // All name `path`.
  static absl::StatusOr<ReplacedFile> Open(const std::string& path, size_t bytes);

  ReplacedFile(ReplacedFile&& other) noexcept;
  ReplacedFile& operator=(ReplacedFile&&) = delete;
  ~ReplacedFile();

  absl::Status Replace(absl::string_view text);

 private:
  explicit ReplacedFile(std::string path) : path_(std::move(path)) {}
  absl::Status MakeDirectory();
  absl::Status MakeTemporary(size_t bytes);
  absl::Status TakeName(absl::string_view text);

  std::string path_;            // no link
  std::string made_directory_;  // "" = it was there
  std::string temporary_;       // "" = there is none (any more)
  UniqueFd file_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_REPLACED_FILE_H_
