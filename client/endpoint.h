// Where a daemon's sockets are, and what to tell a person when nobody answers there.
#ifndef DMUON_CLIENT_ENDPOINT_H_
#define DMUON_CLIENT_ENDPOINT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace dmuon::client {

inline constexpr char kDefaultDirectory[] = "/run/dmuon";

// One daemon: the directory of its two sockets.
struct Endpoint {
  std::string directory;  // absolute

  std::string attach_path() const { return directory + "/attach.sock"; }
  std::string control_path() const { return directory + "/control.sock"; }
};

// "DIR" or "unix:DIR". UNIMPLEMENTED for host:port; INVALID_ARGUMENT for what is empty or too long
// for a socket address.
absl::StatusOr<Endpoint> ParseEndpoint(const std::string& text);

// A connected unix socket of `type` (SOCK_STREAM, SOCK_SEQPACKET). UNAVAILABLE: nobody listens
// there, with how to start a daemon; PERMISSION_DENIED: not for this user.
absl::StatusOr<UniqueFd> ConnectUnix(const Endpoint& endpoint, const std::string& path, int type,
                                     absl::Duration timeout);

// What ConnectUnix says for `error`, an errno.
absl::Status ConnectError(const Endpoint& endpoint, const std::string& path, int error);
// A daemon is there, and says nothing: it is stopped, or has too much to do.
absl::Status NoAnswerError(const Endpoint& endpoint, absl::Duration timeout);

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_ENDPOINT_H_
