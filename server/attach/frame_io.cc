#include "server/attach/frame_io.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace dmuon::server {
namespace {

constexpr int kMaxDescriptors =
    253;  // the kernel's SCM_MAX_FD: with room for all, none can be left over

// Closes what came by SCM_RIGHTS and counts it.
int CloseDescriptors(msghdr& message) {
  int count = 0;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      close(fd);
      ++count;
    }
  }
  return count;
}

bool Terminated(const char* field, size_t size) { return std::memchr(field, 0, size) != nullptr; }

absl::Status CheckEnvelope(const wire::AttachFrame& frame) {
  if (frame.magic != wire::kAttachMagic)
    return absl::InvalidArgumentError("not an attach frame: wrong magic");
  if (frame.version != wire::kAttachVersion) {
    return absl::FailedPreconditionError(absl::StrCat("version of the attach protocol: expected ",
                                                      wire::kAttachVersion, ", given ",
                                                      frame.version));
  }
  if (!Terminated(frame.client, sizeof(frame.client)) ||
      !Terminated(frame.text, sizeof(frame.text))) {
    return absl::InvalidArgumentError("a text of the attach frame has no end");
  }
  return absl::OkStatus();
}

}  // namespace

Received ReceiveFrame(int socket) {
  Received received;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  iovec io{&received.frame, sizeof(received.frame)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t length;
  do {
    length = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (length < 0 && errno == EINTR);
  if (length < 0) {
    received.kind = errno == EAGAIN ? Received::Kind::kNothing : Received::Kind::kClosed;
    return received;
  }
  received.descriptors = CloseDescriptors(message);
  if (length == 0 && received.descriptors == 0) {
    // An empty packet looks the same as the end. Nobody has a reason to send one.
    received.kind = Received::Kind::kClosed;
    return received;
  }
  if (length != sizeof(received.frame) || (message.msg_flags & MSG_TRUNC) != 0) {
    received.error = absl::InvalidArgumentError(
        absl::StrCat("size of an attach frame: expected ", sizeof(received.frame), " bytes, given ",
                     (message.msg_flags & MSG_TRUNC) != 0 ? "more" : absl::StrCat(length)));
  } else {
    received.error = CheckEnvelope(received.frame);
  }
  received.kind = received.error.ok() ? Received::Kind::kFrame : Received::Kind::kMalformed;
  return received;
}

absl::Status SendFrame(int socket, const wire::AttachFrame& frame, int fd) {
  iovec io{const_cast<wire::AttachFrame*>(&frame), sizeof(frame)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &fd, sizeof(int));
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent != sizeof(frame)) return absl::ErrnoToStatus(errno, "sending an attach frame");
  return absl::OkStatus();
}

wire::AttachFrame ErrorFrame(const absl::Status& status) {
  wire::AttachFrame frame;
  frame.type = wire::AttachType::kError;
  frame.code = static_cast<uint32_t>(status.code());
  SetText(frame.text, sizeof(frame.text), status.message());
  return frame;
}

void SetText(char* field, size_t size, absl::string_view text) {
  const size_t length = std::min(size - 1, text.size());
  std::memcpy(field, text.data(), length);
  std::memset(field + length, 0, size - length);
}

}  // namespace dmuon::server
