// A handle on the process at the other end of a connection: readable when that process is dead.
#ifndef DMUON_SERVER_ATTACH_PIDFD_H_
#define DMUON_SERVER_ATTACH_PIDFD_H_

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "base/unix_socket.h"

namespace dmuon::server {

// By SO_PEERPIDFD, which pins the process that connected (Linux 6.5). Older kernels: pidfd_open on the pid that the
// kernel recorded. FAILED_PRECONDITION when the process is dead, or cannot be seen from this pid namespace.
absl::StatusOr<UniqueFd> PeerPidfd(int socket, const PeerCredentials& peer);

// The second way alone. The pid may have been given to another process since the connection was made, so the
// process that is found must have the uid that connected and be no younger than `connected_ticks`, in clock ticks
// since boot (TicksSinceBoot).
absl::StatusOr<UniqueFd> PidfdByPid(const PeerCredentials& peer, uint64_t connected_ticks);
uint64_t TicksSinceBoot();

}  // namespace dmuon::server

#endif  // DMUON_SERVER_ATTACH_PIDFD_H_
