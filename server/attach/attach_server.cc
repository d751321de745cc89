#include "server/attach/attach_server.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/attach/pidfd.h"

namespace dmuon::server {
namespace {

// What an epoll event is about: the listener, the stop event, or socket or pidfd of connection `key >> 1`.
constexpr uint64_t kListenerKey = 0;
constexpr uint64_t kStopKey = 1;
constexpr uint64_t SocketKey(uint64_t id) { return id << 1; }
constexpr uint64_t PidfdKey(uint64_t id) { return id << 1 | 1; }

constexpr int kFramesPerTurn = 16;  // then the others have their turn
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
constexpr absl::Duration kRepeatPause = absl::Milliseconds(20);
constexpr absl::Duration kLeavePause = absl::Milliseconds(500);

// Refuses with a reason, and reads what is unread: closing over unread packets resets the connection, and the other
// side would see ECONNRESET in place of the reason.
void Refuse(int socket, const absl::Status& status) {
  for (int i = 0; i < 64; ++i) {
    const Received::Kind kind = ReceiveFrame(socket).kind;
    if (kind == Received::Kind::kNothing || kind == Received::Kind::kClosed) break;
  }
  (void)SendFrame(socket, ErrorFrame(status));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttachServer>> AttachServer::Start(UniqueFd listener,
                                                                  Attachments& attachments,
                                                                  AttachOptions options,
                                                                  AttachHandlers handlers) {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll.valid() || !stop.valid())
    return absl::ErrnoToStatus(errno, "epoll of the attach socket");
  std::unique_ptr<AttachServer> server(new AttachServer(std::move(listener), std::move(epoll),
                                                        std::move(stop), attachments,
                                                        std::move(options), std::move(handlers)));
  if (!server->Watch(server->listener_.get(), kListenerKey) ||
      !server->Watch(server->stop_.get(), kStopKey)) {
    return absl::ErrnoToStatus(errno, "epoll of the attach socket");
  }
  server->last_id_ = 1;  // keys 0 and 1 are taken; connections count from 2 in steps of one
  server->thread_ = std::thread([raw = server.get()] { raw->Run(); });
  return server;
}

AttachServer::AttachServer(UniqueFd listener, UniqueFd epoll, UniqueFd stop,
                           Attachments& attachments, AttachOptions options, AttachHandlers handlers)
    : listener_(std::move(listener)),
      epoll_(std::move(epoll)),
      stop_(std::move(stop)),
      attachments_(attachments),
      options_(std::move(options)),
      handlers_(std::move(handlers)) {}

AttachServer::~AttachServer() {
  if (!thread_.joinable()) return;
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

bool AttachServer::Watch(int fd, uint64_t key) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void AttachServer::Run() {
  pthread_setname_np(pthread_self(), "dmuond-attach");
  for (;;) {
    epoll_event events[64];
    const int count = epoll_wait(epoll_.get(), events, 64, UntilNextDeadline());
    if (!accepting_) accepting_ = Watch(listener_.get(), kListenerKey);
    for (int i = 0; i < count; ++i) {
      const uint64_t key = events[i].data.u64;
      if (key == kStopKey) return;
      if (key == kListenerKey) {
        Accept();
      } else if ((key & 1) != 0) {
        OnDeath(key >> 1);
      } else {
        OnSocket(key >> 1);
      }
    }
    CloseSilent();
    EndLeft();
    RepeatDeaths();
  }
}

int AttachServer::UntilNextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  if (!accepting_) next = absl::Now() + kAcceptPause;
  if (calls_left_) next = absl::Now() + kRepeatPause;
  if (unheard_ > 0) next = std::min(next, absl::Now() + kLeavePause);
  if (unattached_ > 0) {
    for (const auto& [id, c] : connections_) {
      if (!c.trainer.has_value()) next = std::min(next, c.hello_deadline);
    }
  }
  if (next == absl::InfiniteFuture()) return -1;
  const int64_t ms = absl::ToInt64Milliseconds(next - absl::Now()) + 1;
  return static_cast<int>(std::clamp<int64_t>(ms, 0, INT_MAX));
}

void AttachServer::Accept() {
  UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      if (!std::exchange(accept_fails_, true)) {  // it is tried ten times a second
        Log(LogLevel::kError, "attach_accept_failed",
            {{"error", absl::ErrnoToStatus(errno, "accept4").message()}});
      }
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      accepting_ = false;
    }
    return;
  }
  if (std::exchange(accept_fails_, false)) Log(LogLevel::kInfo, "attach_accept_resumed", {});
  absl::StatusOr<Connection> connection = Admit(socket.get());
  if (!connection.ok()) {
    Refuse(socket.get(), connection.status());
    return;
  }
  const uint64_t id = ++last_id_;
  if (!Watch(socket.get(), SocketKey(id))) return;
  connection->socket = std::move(socket);
  connections_.emplace(id, *std::move(connection));
  ++unattached_;
}

absl::StatusOr<AttachServer::Connection> AttachServer::Admit(int socket) const {
  Connection connection;
  ASSIGN_OR_RETURN(connection.peer, ReadPeerCredentials(socket));
  if (!options_.uids.Allows(connection.peer.uid)) {
    Log(LogLevel::kWarning, "attach_refused",
        {{"uid", connection.peer.uid}, {"reason", "uid is not allowed"}});
    return absl::PermissionDeniedError(
        absl::StrCat("uid ", connection.peer.uid, " may not use this daemon (allow_uids)"));
  }
  if (unattached_ >= options_.max_unattached) {
    return absl::ResourceExhaustedError(
        absl::StrCat("connections that have not said HELLO: at most ", options_.max_unattached));
  }
  ASSIGN_OR_RETURN(connection.pidfd, PeerPidfd(socket, connection.peer));
  connection.hello_deadline = absl::Now() + options_.hello_timeout;
  return connection;
}

void AttachServer::OnSocket(uint64_t id) {
  for (int i = 0; i < kFramesPerTurn; ++i) {
    // Looked up anew: the events of one turn, and answers, may have ended it.
    const auto it = connections_.find(id);
    if (it == connections_.end() || !it->second.socket.valid()) return;
    Connection& connection = it->second;
    const Received received = ReceiveFrame(connection.socket.get());
    if (received.kind == Received::Kind::kNothing) return;
    if (received.kind == Received::Kind::kClosed) return CloseSocket(id);
    absl::Status status = received.error;
    if (status.ok() && received.descriptors > 0) {
      status = SendFrame(connection.socket.get(),
                         ErrorFrame(absl::InvalidArgumentError(
                             "the daemon takes no descriptors: a trainer maps the "
                             "daemon's memory, not the other way round")));
    } else if (status.ok()) {
      status = Answer(connection, id, received.frame);
    }
    if (!status.ok()) {
      Refuse(connection.socket.get(), status);
      return CloseSocket(id);
    }
  }
}

// An error ends the connection; a request that cannot be fulfilled is answered by ERROR and is none.
absl::Status AttachServer::Answer(Connection& connection, uint64_t id,
                                  const wire::AttachFrame& frame) {
  switch (frame.type) {
    case wire::AttachType::kHello: return Hello(connection, id, frame);
    case wire::AttachType::kFetch: return Fetch(connection, frame);
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("type of an attach frame: expected HELLO or FETCH, given ",
                       static_cast<uint32_t>(frame.type)));
  }
}

absl::Status AttachServer::Hello(Connection& connection, uint64_t id,
                                 const wire::AttachFrame& frame) {
  if (connection.trainer.has_value())
    return absl::FailedPreconditionError("HELLO was said already");
  ASSIGN_OR_RETURN(const Attachments::Added added,
                   attachments_.Add(connection.peer.uid, connection.peer.pid));
  connection.trainer = added.trainer;
  --unattached_;
  Log(LogLevel::kInfo, "attached",
      {{"attachment", added.trainer.attachment.value()},
       {"pid", connection.peer.pid},
       {"uid", connection.peer.uid},
       {"client", absl::string_view(frame.client)}});
  // A process that is dead already makes this readable at once.
  if (!Watch(connection.pidfd.get(), PidfdKey(id))) {
    return absl::ErrnoToStatus(errno, "watching the trainer's process");
  }
  wire::AttachFrame welcome;
  welcome.type = wire::AttachType::kWelcome;
  std::copy(added.token.begin(), added.token.end(), welcome.token);
  SetText(welcome.text, sizeof(welcome.text), options_.daemon_version);
  return SendFrame(connection.socket.get(), welcome);
}

absl::Status AttachServer::Fetch(Connection& connection, const wire::AttachFrame& frame) {
  if (!connection.trainer.has_value()) return absl::FailedPreconditionError("FETCH before HELLO");
  const auto kind = static_cast<uint32_t>(frame.arena);
  if (kind < static_cast<uint32_t>(wire::ArenaKind::kControl) ||
      kind > static_cast<uint32_t>(wire::ArenaKind::kWeight)) {
    return absl::InvalidArgumentError(
        absl::StrCat("arena of a FETCH: expected 1 to 3, given ", kind));
  }
  if (frame.rank > static_cast<uint32_t>(INT_MAX)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank of a FETCH: expected at most ", INT_MAX, ", given ", frame.rank));
  }
  absl::StatusOr<ArenaHandle> arena = handlers_.arena(*connection.trainer, SessionId(frame.session),
                                                      static_cast<int>(frame.rank), frame.arena);
  if (!arena.ok()) return SendFrame(connection.socket.get(), ErrorFrame(arena.status()));
  wire::AttachFrame answer;
  answer.type = wire::AttachType::kArena;
  answer.session = frame.session;
  answer.rank = frame.rank;
  answer.arena = frame.arena;
  answer.bytes = arena->bytes;
  return SendFrame(connection.socket.get(), answer, arena->fd.get());
}

void AttachServer::CloseSocket(uint64_t id) {
  Connection& connection = connections_.at(id);
  if (!connection.trainer.has_value() || !attachments_.InSession(connection.trainer->attachment)) {
    return End(id, "closed");
  }
  connection.socket.Reset();  // epoll forgets it
  ++unheard_;
  Log(LogLevel::kInfo, "attach_socket_closed",
      {{"attachment", connection.trainer->attachment.value()}, {"pid", connection.peer.pid}});
}

void AttachServer::OnDeath(uint64_t id) {
  if (connections_.contains(id)) End(id, "process ended");
}

void AttachServer::End(uint64_t id, absl::string_view why) {
  const auto it = connections_.find(id);
  const std::optional<Trainer> trainer = it->second.trainer;
  if (!it->second.socket.valid()) --unheard_;
  connections_.erase(it);
  if (!trainer.has_value()) {
    --unattached_;
    return;
  }
  attachments_.Remove(trainer->attachment);
  Log(LogLevel::kInfo, "detached",
      {{"attachment", trainer->attachment.value()}, {"pid", trainer->pid}, {"reason", why}});
  handlers_.gone(trainer->attachment);
}

// Whoever closes its socket in a session ends with that, and need not end its process first.
void AttachServer::EndLeft() {
  if (unheard_ == 0) return;
  std::vector<uint64_t> left;
  for (const auto& [id, c] : connections_) {
    if (!c.socket.valid() && !attachments_.InSession(c.trainer->attachment)) left.push_back(id);
  }
  for (uint64_t id : left) End(id, "closed");
}

void AttachServer::RepeatDeaths() {
  const std::vector<AttachmentId> left = attachments_.RemovedWithCalls();
  calls_left_ = !left.empty();
  for (AttachmentId id : left) handlers_.gone(id);
}

void AttachServer::CloseSilent() {
  if (unattached_ == 0) return;
  const absl::Time now = absl::Now();
  std::vector<uint64_t> silent;
  for (const auto& [id, c] : connections_) {
    if (!c.trainer.has_value() && c.hello_deadline <= now) silent.push_back(id);
  }
  for (uint64_t id : silent) {
    Refuse(connections_.at(id).socket.get(),
           absl::DeadlineExceededError(
               absl::StrCat("no HELLO within ", absl::FormatDuration(options_.hello_timeout))));
    End(id, "silent");
  }
}

}  // namespace dmuon::server
