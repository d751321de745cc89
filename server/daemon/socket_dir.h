// The directory of the two sockets: made, locked against a second daemon, and left as it was found.
#ifndef DMUON_SERVER_DAEMON_SOCKET_DIR_H_
#define DMUON_SERVER_DAEMON_SOCKET_DIR_H_

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuon::server {

// Held while the daemon lives. Destruction removes the sockets and the lock file, and the directory if it was made
// here.
class SocketDir {
 public:
  // FAILED_PRECONDITION: the directory is not to be trusted (another user's, or open to writing by all).
  // ALREADY_EXISTS: another daemon is alive there, with its pid. Else what the system said.
  static absl::StatusOr<SocketDir> Acquire(const std::string& path, mode_t mode);

  SocketDir(SocketDir&& other) noexcept;
  SocketDir& operator=(SocketDir&&) = delete;
  ~SocketDir();

  std::string attach_path() const { return path_ + "/attach.sock"; }
  std::string control_path() const { return path_ + "/control.sock"; }

 private:
  SocketDir(std::string path, bool made) : path_(std::move(path)), made_(made) {}
  absl::Status Lock();
  std::string lock_path() const { return path_ + "/dmuond.lock"; }

  std::string path_;
  bool made_ = false;
  UniqueFd lock_;  // flock'ed; valid while held
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_SOCKET_DIR_H_
