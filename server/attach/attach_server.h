// The attach socket: one thread that accepts trainers, answers their frames and watches their pidfds.
//
// A trainer is a process, not a connection. Its attachment ends when its pidfd says that the process is dead. The end
// of the connection alone ends it only when the trainer is in no session (it has closed everything, and there is
// nothing that could be lost): while a session is open, the pidfd is waited for.
#ifndef DMUON_SERVER_ATTACH_ATTACH_SERVER_H_
#define DMUON_SERVER_ATTACH_ATTACH_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "base/unix_socket.h"
#include "server/attach/attachments.h"
#include "server/attach/frame_io.h"

namespace dmuon::server {

struct AttachOptions {
  UidPolicy uids;
  std::string daemon_version;
  absl::Duration hello_timeout = absl::Seconds(5);  // a connection that says nothing is closed
  int max_unattached = 128;                         // connections that have not said HELLO yet
};

// Called on the attach thread; must not block.
struct AttachHandlers {
  std::function<absl::StatusOr<ArenaHandle>(const Trainer&, SessionId, int rank, wire::ArenaKind)>
      arena;
  // The attachment is over, and its token dead. Said again and again while gRPC calls of it still run.
  std::function<void(AttachmentId)> gone;
};

class AttachServer {
 public:
  // `listener`: a SOCK_SEQPACKET socket. `attachments` must outlive the server.
  static absl::StatusOr<std::unique_ptr<AttachServer>> Start(UniqueFd listener,
                                                             Attachments& attachments,
                                                             AttachOptions options,
                                                             AttachHandlers handlers);
  ~AttachServer();  // stops: closes all connections, calls nobody

  AttachServer(const AttachServer&) = delete;
  AttachServer& operator=(const AttachServer&) = delete;

 private:
  struct Connection {
    UniqueFd socket;
    UniqueFd pidfd;
    PeerCredentials peer;
    absl::Time hello_deadline;
    std::optional<Trainer> trainer;  // after HELLO
  };

  AttachServer(UniqueFd listener, UniqueFd epoll, UniqueFd stop, Attachments& attachments,
               AttachOptions options, AttachHandlers handlers);
  void Run();
  void Accept();
  absl::StatusOr<Connection> Admit(int socket) const;
  void OnSocket(uint64_t id);
  absl::Status Answer(Connection& connection, uint64_t id, const wire::AttachFrame& frame);
  absl::Status Hello(Connection& connection, uint64_t id, const wire::AttachFrame& frame);
  absl::Status Fetch(Connection& connection, const wire::AttachFrame& frame);
  void CloseSocket(uint64_t id);
  void OnDeath(uint64_t id);
  void End(uint64_t id, absl::string_view why);
  void CloseSilent();
  void EndLeft();
  void RepeatDeaths();
  bool Watch(int fd, uint64_t key);
  int UntilNextDeadline() const;

  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd stop_;  // eventfd
  Attachments& attachments_;
  const AttachOptions options_;
  const AttachHandlers handlers_;
  std::map<uint64_t, Connection> connections_;  // of the thread
  uint64_t last_id_ = 0;
  int unattached_ = 0;
  int unheard_ = 0;          // attachments whose socket is closed and whose process is in a session
  bool calls_left_ = false;  // of attachments that have ended
  bool accepting_ = true;    // false for a while after there were no descriptors left
  bool accept_fails_ = false;  // since the last time that it went well
  std::thread thread_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_ATTACH_ATTACH_SERVER_H_
