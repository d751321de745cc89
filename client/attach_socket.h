// One attachment to the daemon: who we are to it, whether it lives, and the descriptors of our
// arenas.
#ifndef DMUON_CLIENT_ATTACH_SOCKET_H_
#define DMUON_CLIENT_ATTACH_SOCKET_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "client/endpoint.h"
#include "proto/wire/attach_frame.h"

namespace dmuon::client {

// Thread-safe.
class AttachSocket {
 public:
  // Connects and says HELLO with `client_uuid`.
  static absl::StatusOr<std::unique_ptr<AttachSocket>> Open(const Endpoint& endpoint,
                                                            const std::string& client_uuid,
                                                            absl::Duration timeout);
  AttachSocket(const AttachSocket&) = delete;
  AttachSocket& operator=(const AttachSocket&) = delete;

  // 32 hex digits: the value of wire::kTokenMetadata.
  const std::string& token() const { return token_; }
  const std::string& daemon_version() const { return daemon_version_; }
  pid_t daemon_pid() const { return daemon_pid_; }

  // UNAVAILABLE once the daemon is dead or has ended this attachment. One system call.
  absl::Status CheckAlive() const;

  // The descriptor of an arena of a configured session, and its size in the daemon's words.
  struct Arena {
    UniqueFd fd;
    uint64_t bytes = 0;
  };
  absl::StatusOr<Arena> Fetch(uint64_t session, uint32_t rank, wire::ArenaKind kind)
      ABSL_LOCKS_EXCLUDED(mu_);

  // In a forked child: closes what was inherited, says nothing to the daemon.
  void Abandon();

 private:
  AttachSocket(Endpoint endpoint, UniqueFd socket, absl::Duration timeout)
      : endpoint_(std::move(endpoint)), timeout_(timeout), socket_(std::move(socket)) {}

  // Sends a frame and receives its answer; ERROR becomes its status. `fd` gets a descriptor that
  // came along.
  absl::StatusOr<wire::AttachFrame> Exchange(const wire::AttachFrame& request, UniqueFd* fd)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void OpenPidfd();

  const Endpoint endpoint_;
  const absl::Duration timeout_;  // of an answer
  absl::Mutex mu_;                // one exchange at a time
  UniqueFd socket_;
  UniqueFd pidfd_;  // of the daemon; not valid when it is in another pid namespace
  pid_t daemon_pid_ = 0;
  std::string token_;
  std::string daemon_version_;
};

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_ATTACH_SOCKET_H_
