#include "base/unix_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace dmuon {
namespace {

uid_t ReadOverflowUid() {
  unsigned value = 65534;
  if (std::FILE* file = std::fopen("/proc/sys/kernel/overflowuid", "re"); file != nullptr) {
    if (std::fscanf(file, "%u", &value) != 1) value = 65534;
    std::fclose(file);
  }
  return value;
}

absl::Status RemoveDeadSocket(const std::string& path) {
  struct stat found;
  if (lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return absl::ErrnoToStatus(errno, absl::StrCat("looking at ", path));
  }
  if (!S_ISSOCK(found.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is there and is not a socket"));
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return absl::ErrnoToStatus(errno, absl::StrCat("removing the dead socket ", path));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PeerCredentials> ReadPeerCredentials(int socket) {
  ucred credentials;
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return absl::ErrnoToStatus(errno, "reading the credentials of a connection");
  }
  return PeerCredentials{credentials.uid, credentials.gid, credentials.pid};
}

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, mode_t mode) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the path of a socket has at most ",
                                                   sizeof(address.sun_path) - 1, " bytes, '", path,
                                                   "' has ", path.size()));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  if (absl::Status removed = RemoveDeadSocket(path); !removed.ok()) return removed;

  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "making a unix socket");
  // The socket is born with this mode (less the umask); chmod gives back what the umask took.
  fchmod(fd.get(), mode);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("binding ", path));
  }
  if (chmod(path.c_str(), mode) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("chmod of ", path));
  if (listen(fd.get(), SOMAXCONN) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("listening on ", path));
  return fd;
}

UidPolicy::UidPolicy(std::vector<uid_t> allowed)
    : allowed_(std::move(allowed)), own_(geteuid()), overflow_(ReadOverflowUid()) {}

bool UidPolicy::Allows(uid_t uid) const {
  if (uid == own_ || uid == 0) return true;
  if (uid == overflow_) return false;
  return allowed_.empty() || std::find(allowed_.begin(), allowed_.end(), uid) != allowed_.end();
}

}  // namespace dmuon
