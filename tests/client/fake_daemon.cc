#include "tests/client/fake_daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace dmuon::client {
namespace {

void Check(bool condition, const char* what) {
  if (condition) return;
  perror(what);
  abort();
}

void Send(int fd, const Answer& answer) {
  iovec data = {.iov_base = const_cast<wire::AttachFrame*>(&answer.frame), .iov_len = answer.bytes};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  std::vector<int> raw;
  for (const UniqueFd& descriptor : answer.descriptors) raw.push_back(descriptor.get());
  std::vector<char> control(CMSG_SPACE(raw.size() * sizeof(int)));
  if (!raw.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(raw.size() * sizeof(int));
    memcpy(CMSG_DATA(header), raw.data(), raw.size() * sizeof(int));
  }
  sendmsg(fd, &message, MSG_NOSIGNAL);
}

}  // namespace

FakeAttachServer::FakeAttachServer(const Endpoint& endpoint, Script script) {
  listener_.Reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = endpoint.attach_path();
  memcpy(address.sun_path, path.data(), path.size());
  Check(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0, "bind");
  Check(listen(listener_.get(), 4) == 0, "listen");
  int ends[2];
  Check(pipe2(ends, O_CLOEXEC) == 0, "pipe");
  stop_read_.Reset(ends[0]);
  stop_write_.Reset(ends[1]);
  thread_ = std::thread([this, script = std::move(script)] { Serve(script); });
}

FakeAttachServer::~FakeAttachServer() { HangUp(); }

void FakeAttachServer::HangUp() {
  stop_write_.Reset();
  if (thread_.joinable()) thread_.join();
}

void FakeAttachServer::Serve(const Script& script) {
  const auto wait = [this](int fd) {
    pollfd watched[2] = {{fd, POLLIN, 0}, {stop_read_.get(), POLLIN, 0}};
    poll(watched, 2, -1);
    return watched[1].revents == 0;
  };
  if (!wait(listener_.get())) return;
  UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  while (wait(connection.get())) {
    wire::AttachFrame frame;
    if (recv(connection.get(), &frame, sizeof(frame), 0) != sizeof(frame)) return;
    const Answer answer = script(frame);
    if (answer.hang_up) return;
    Send(connection.get(), answer);
  }
}

Answer Welcome(const wire::AttachFrame& frame) {
  Answer answer;
  answer.frame.type = wire::AttachType::kError;
  answer.frame.code = 12;  // UNIMPLEMENTED
  if (frame.type != wire::AttachType::kHello) return answer;
  answer.frame.type = wire::AttachType::kWelcome;
  for (int i = 0; i < wire::kTokenBytes; ++i) answer.frame.token[i] = static_cast<uint8_t>(i);
  strcpy(answer.frame.text, "9.9.9");
  return answer;
}

UniqueFd SealedMemory(size_t bytes) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  Check(ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, "ftruncate");
  Check(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, "seal");
  return fd;
}

void PageMemory::Freed::operator()(std::byte* p) const { std::free(p); }

PageMemory::PageMemory(const wire::PageLayout& layout, uint64_t table_digest)
    : memory_(static_cast<std::byte*>(std::aligned_alloc(4096, layout.bytes))) {
  std::fill_n(memory_.get(), layout.bytes, std::byte{0});
  page_ = wire::ControlPage::Create(memory_.get(), layout, table_digest);
}

}  // namespace dmuon::client
