#include "client/attach_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace dmuon::client {
namespace {

#ifndef SO_PEERPIDFD
constexpr int SO_PEERPIDFD = 77;
#endif

constexpr int kMaxDescriptors = 4;

template <size_t N>
std::string Text(const char (&field)[N]) {
  return std::string(field, strnlen(field, N));
}

absl::string_view Name(wire::AttachType type) {
  switch (type) {
    case wire::AttachType::kUnspecified: return "UNSPECIFIED";
    case wire::AttachType::kHello: return "HELLO";
    case wire::AttachType::kWelcome: return "WELCOME";
    case wire::AttachType::kFetch: return "FETCH";
    case wire::AttachType::kArena: return "ARENA";
    case wire::AttachType::kError: return "ERROR";
  }
  return "an unknown frame";
}

// The descriptors of a message, each owned; those beyond the first are closed.
UniqueFd TakeDescriptor(msghdr& message) {
  UniqueFd first;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int raw;
      memcpy(&raw, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      UniqueFd fd(raw);
      if (!first.valid()) first = std::move(fd);
    }
  }
  return first;
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttachSocket>> AttachSocket::Open(const Endpoint& endpoint,
                                                                 const std::string& client_uuid,
                                                                 absl::Duration timeout) {
  ASSIGN_OR_RETURN(UniqueFd fd,
                   ConnectUnix(endpoint, endpoint.attach_path(), SOCK_SEQPACKET, timeout));
  std::unique_ptr<AttachSocket> attach(new AttachSocket(endpoint, std::move(fd), timeout));
  attach->OpenPidfd();
  wire::AttachFrame hello;
  hello.type = wire::AttachType::kHello;
  absl::SNPrintF(hello.client, sizeof(hello.client), "%s", client_uuid);
  absl::MutexLock lock(&attach->mu_);
  ASSIGN_OR_RETURN(const wire::AttachFrame welcome, attach->Exchange(hello, nullptr));
  if (welcome.type != wire::AttachType::kWelcome) {
    return absl::InternalError(absl::StrFormat("%s: expected WELCOME, got %s",
                                               endpoint.attach_path(), Name(welcome.type)));
  }
  attach->token_ = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(welcome.token), sizeof(welcome.token)));
  attach->daemon_version_ = Text(welcome.text);
  return attach;
}

// The kernel's word for who listens. Where the daemon is in another pid namespace there is no pidfd
// for us, and the end of the socket has to do.
void AttachSocket::OpenPidfd() {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) daemon_pid_ = peer.pid;
  int fd = -1;
  size = sizeof(fd);
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0 && fd >= 0) {
    pidfd_.Reset(fd);
  } else if (daemon_pid_ > 0) {
    pidfd_.Reset(static_cast<int>(syscall(SYS_pidfd_open, daemon_pid_, 0)));
  }
}

absl::Status AttachSocket::CheckAlive() const {
  pollfd watched[2] = {{.fd = pidfd_.get(), .events = POLLIN, .revents = 0},
                       {.fd = socket_.get(), .events = POLLRDHUP, .revents = 0}};
  if (poll(watched, 2, 0) <= 0) return absl::OkStatus();
  if (watched[0].revents != 0) {
    return absl::UnavailableError(
        absl::StrFormat("the daemon at %s (pid %d) is dead; its sessions are lost",
                        endpoint_.directory, daemon_pid_));
  }
  if ((watched[1].revents & (POLLHUP | POLLERR | POLLRDHUP)) != 0) {
    return absl::UnavailableError(
        absl::StrFormat("the daemon at %s has ended this attachment", endpoint_.directory));
  }
  return absl::OkStatus();
}

absl::StatusOr<wire::AttachFrame> AttachSocket::Exchange(const wire::AttachFrame& request,
                                                         UniqueFd* fd) {
  ssize_t sent;
  do {
    sent = send(socket_.get(), &request, sizeof(request), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  // A daemon that refuses us may have hung up already; what it said before that is there to be read.
  if (sent < 0 && errno == EAGAIN) return NoAnswerError(endpoint_, timeout_);
  if (sent != sizeof(request) && errno != EPIPE && errno != ECONNRESET) {
    return absl::UnavailableError(absl::StrFormat("%s: sending %s: %s", endpoint_.attach_path(),
                                                  Name(request.type), strerror(errno)));
  }
  wire::AttachFrame answer;
  iovec data = {.iov_base = &answer, .iov_len = sizeof(answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  // The kernel says ECONNRESET once, and before what is there to be read, when the daemon has hung up without reading us.
  bool reset = false;
  ssize_t received;
  do {
    received = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 &&
           (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (received <= 0) {
    const int error = errno;
    RETURN_IF_ERROR(CheckAlive());
    if (received < 0 && error == EAGAIN) return NoAnswerError(endpoint_, timeout_);
    return absl::UnavailableError(absl::StrFormat(
        "%s: waiting for the answer to %s: %s", endpoint_.attach_path(), Name(request.type),
        received == 0 ? "the daemon hung up" : strerror(error)));
  }
  UniqueFd descriptor = TakeDescriptor(message);
  if (received != sizeof(answer) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 ||
      answer.magic != wire::kAttachMagic || answer.version != wire::kAttachVersion) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: expected frames of version %d, got %d bytes, magic %#x, version %d: client and daemon "
        "are of different releases",
        endpoint_.attach_path(), wire::kAttachVersion, received, answer.magic, answer.version));
  }
  if (answer.type == wire::AttachType::kError) {
    const auto code = static_cast<absl::StatusCode>(answer.code);
    return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
                        Text(answer.text));
  }
  if (fd != nullptr) *fd = std::move(descriptor);
  return answer;
}

absl::StatusOr<AttachSocket::Arena> AttachSocket::Fetch(uint64_t session, uint32_t rank,
                                                        wire::ArenaKind kind) {
  wire::AttachFrame fetch;
  fetch.type = wire::AttachType::kFetch;
  fetch.session = session;
  fetch.rank = rank;
  fetch.arena = kind;
  absl::MutexLock lock(&mu_);
  Arena arena;
  ASSIGN_OR_RETURN(const wire::AttachFrame answer, Exchange(fetch, &arena.fd));
  if (answer.type != wire::AttachType::kArena || answer.session != session || answer.rank != rank ||
      answer.arena != kind || !arena.fd.valid()) {
    return absl::InternalError(
        absl::StrFormat("expected ARENA of session %d with a descriptor, got %s of session %d",
                        session, Name(answer.type), answer.session));
  }
  arena.bytes = answer.bytes;
  return arena;
}

void AttachSocket::Abandon() {
  socket_.Reset();
  pidfd_.Reset();
}

}  // namespace dmuon::client
