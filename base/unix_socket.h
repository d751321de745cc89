// Unix sockets as the daemon uses them: bound to a path with a mode, and who is at the other end.
#ifndef DMUON_BASE_UNIX_SOCKET_H_
#define DMUON_BASE_UNIX_SOCKET_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuon {

// The process that made the connection, as the kernel vouches for it. `pid` is 0 when that process cannot be seen from
// the caller's pid namespace.
struct PeerCredentials {
  uid_t uid = 0;
  gid_t gid = 0;
  pid_t pid = 0;
};

absl::StatusOr<PeerCredentials> ReadPeerCredentials(int socket);

// A listening, non-blocking socket of `type` (SOCK_STREAM or SOCK_SEQPACKET) at `path`. A socket that is already there
// is replaced: the caller knows that its owner is dead. FAILED_PRECONDITION when something else is there.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, int type, mode_t mode);

// Which users may connect: this process's own, root, and those listed; with an empty list whoever can open the socket.
// Never the overflow uid, which stands for "a user that this user namespace cannot name".
class UidPolicy {
 public:
  UidPolicy() : UidPolicy(std::vector<uid_t>{}) {}
  explicit UidPolicy(std::vector<uid_t> allowed);
  bool Allows(uid_t uid) const;

 private:
  std::vector<uid_t> allowed_;
  uid_t own_;
  uid_t overflow_;
};

}  // namespace dmuon

#endif  // DMUON_BASE_UNIX_SOCKET_H_
