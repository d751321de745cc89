#include "client/attach_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/synchronization/notification.h"
#include "tests/client/fake_daemon.h"

namespace dmuon::client {
namespace {

using ::testing::HasSubstr;
using wire::ArenaKind;
using wire::AttachFrame;
using wire::AttachType;

class AttachSocketTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<AttachSocket>> Open() {
    return AttachSocket::Open(endpoint_, "uuid-of-a-client", absl::Seconds(20));
  }
  // Answers FETCH by `answer`, and HELLO by WELCOME.
  FakeAttachServer::Script OnFetch(const std::function<Answer(const AttachFrame&)>& answer) {
    return [answer](const AttachFrame& frame) {
      return frame.type == AttachType::kHello ? Welcome(frame) : answer(frame);
    };
  }
  static Answer ArenaAnswer(const AttachFrame& fetch, size_t bytes) {
    Answer answer;
    answer.frame = fetch;
    answer.frame.type = AttachType::kArena;
    answer.frame.bytes = bytes;
    answer.descriptors.push_back(SealedMemory(bytes));
    return answer;
  }
  static size_t OpenDescriptors() {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      ++count;
    return count;
  }

  TemporaryDirectory directory_;
  Endpoint endpoint_{directory_.path()};
};

TEST_F(AttachSocketTest, SaysHelloWithItsUuidAndKeepsTheToken) {
  std::string client;
  FakeAttachServer server(endpoint_, [&client](const AttachFrame& frame) {
    client = frame.client;
    return Welcome(frame);
  });
  const auto attach = Open();
  ASSERT_TRUE(attach.ok()) << attach.status();
  EXPECT_EQ(client, "uuid-of-a-client");
  EXPECT_EQ((*attach)->token(), kWelcomeToken);
  EXPECT_EQ((*attach)->daemon_version(), "9.9.9");
  EXPECT_EQ((*attach)->daemon_pid(), getpid());
  EXPECT_TRUE((*attach)->CheckAlive().ok());
}

TEST_F(AttachSocketTest, ARefusalKeepsItsCodeAndWords) {
  FakeAttachServer server(endpoint_, [](const AttachFrame&) {
    Answer answer;
    answer.frame.type = AttachType::kError;
    answer.frame.code = static_cast<uint32_t>(absl::StatusCode::kPermissionDenied);
    strcpy(answer.frame.text, "uid 7 may not attach");
    return answer;
  });
  EXPECT_EQ(Open().status(), absl::PermissionDeniedError("uid 7 may not attach"));
}

// As a daemon does that knows enough from who called: the kernel then says ECONNRESET before the words, if it comes to that.
TEST_F(AttachSocketTest, ARefusalWithoutALookAtTheHelloKeepsItsWords) {
  const UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strcpy(address.sun_path, endpoint_.attach_path().c_str());
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 8), 0);
  AttachFrame refusal;
  refusal.type = AttachType::kError;
  refusal.code = static_cast<uint32_t>(absl::StatusCode::kPermissionDenied);
  strcpy(refusal.text, "not you");
  constexpr int kTimes = 300;
  std::thread server([&] {
    for (int i = 0; i < kTimes; ++i) {
      const UniqueFd caller(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      pollfd hello{.fd = caller.get(), .events = POLLIN, .revents = 0};
      poll(&hello, 1, -1);
      send(caller.get(), &refusal, sizeof(refusal), MSG_NOSIGNAL);
    }
  });
  for (int i = 0; i < kTimes; ++i)
    EXPECT_EQ(Open().status(), absl::PermissionDeniedError("not you")) << i;
  server.join();
}

TEST_F(AttachSocketTest, AnotherReleaseIsNamed) {
  FakeAttachServer server(endpoint_, [](const AttachFrame& frame) {
    Answer answer = Welcome(frame);
    answer.frame.version = wire::kAttachVersion + 1;
    return answer;
  });
  const auto status = Open().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("different releases"));
}

TEST_F(AttachSocketTest, AShortFrameIsRefused) {
  FakeAttachServer server(endpoint_, [](const AttachFrame& frame) {
    Answer answer = Welcome(frame);
    answer.bytes = 100;
    return answer;
  });
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AttachSocketTest, AHangUpInsteadOfAWelcomeIsUnavailable) {
  FakeAttachServer server(endpoint_, [](const AttachFrame&) { return Answer{.hang_up = true}; });
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(AttachSocketTest, ADaemonThatSaysNothingIsADeadlineThatSaysSo) {
  absl::Notification over;
  FakeAttachServer server(endpoint_, [&over](const AttachFrame& frame) {
    over.WaitForNotification();
    return Welcome(frame);
  });
  const auto status =
      AttachSocket::Open(endpoint_, "uuid-of-a-client", absl::Milliseconds(100)).status();
  over.Notify();
  EXPECT_EQ(status, absl::DeadlineExceededError("the daemon at " + directory_.path() +
                                                " did not answer within 100ms"));
}

TEST_F(AttachSocketTest, FetchesAnArenaWithOneDescriptor) {
  FakeAttachServer server(endpoint_,
                          OnFetch([](const AttachFrame& f) { return ArenaAnswer(f, 8192); }));
  const auto attach = Open();
  ASSERT_TRUE(attach.ok());
  const auto arena = (*attach)->Fetch(3, 1, ArenaKind::kGrad);
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ(arena->bytes, 8192u);
  EXPECT_NE(fcntl(arena->fd.get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(AttachSocketTest, SurplusDescriptorsAreClosed) {
  FakeAttachServer server(endpoint_, OnFetch([](const AttachFrame& f) {
                            Answer answer = ArenaAnswer(f, 4096);
                            answer.descriptors.push_back(SealedMemory(4096));
                            answer.descriptors.push_back(SealedMemory(4096));
                            return answer;
                          }));
  const auto attach = Open();
  ASSERT_TRUE(attach.ok());
  // The fake daemon lives in this process and drops its own copies after an exchange; so look after the next one.
  { const auto warm_up = (*attach)->Fetch(3, 1, ArenaKind::kGrad); }
  { const auto next = (*attach)->Fetch(3, 1, ArenaKind::kGrad); }
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 10; ++i) {
    const auto arena = (*attach)->Fetch(3, 1, ArenaKind::kGrad);
    ASSERT_TRUE(arena.ok());
  }
  EXPECT_LE(OpenDescriptors(), before + 3);
}

TEST_F(AttachSocketTest, AnArenaWithoutDescriptorOrOfAnotherRankIsRefused) {
  int asked = 0;
  FakeAttachServer server(endpoint_, OnFetch([&asked](const AttachFrame& f) {
                            Answer answer = ArenaAnswer(f, 4096);
                            if (++asked == 1) answer.descriptors.clear();
                            if (asked == 2) answer.frame.rank = f.rank + 1;
                            return answer;
                          }));
  const auto attach = Open();
  ASSERT_TRUE(attach.ok());
  EXPECT_EQ((*attach)->Fetch(3, 1, ArenaKind::kGrad).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ((*attach)->Fetch(3, 1, ArenaKind::kGrad).status().code(), absl::StatusCode::kInternal);
}

TEST_F(AttachSocketTest, TheEndOfTheAttachmentIsNoticed) {
  FakeAttachServer server(endpoint_, Welcome);
  const auto attach = Open();
  ASSERT_TRUE(attach.ok());
  server.HangUp();
  const auto status = (*attach)->CheckAlive();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ended this attachment"));
}

// The pidfd speaks even when a forked child of the daemon keeps the socket open.
TEST_F(AttachSocketTest, TheDeathOfTheDaemonIsNoticedThoughItsSocketIsHeld) {
  int ready[2], hold[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(hold, O_CLOEXEC), 0);
  const pid_t daemon = fork();
  char byte;
  if (daemon == 0) {
    close(hold[1]);
    FakeAttachServer server(endpoint_, Welcome);
    if (fork() == 0) {
      (void)!read(hold[0], &byte, 1);  // has the sockets until the test ends
      _exit(0);
    }
    (void)!write(ready[1], "r", 1);
    pause();
    _exit(0);
  }
  close(ready[1]);
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  const auto attach = Open();
  ASSERT_TRUE(attach.ok()) << attach.status();
  EXPECT_EQ((*attach)->daemon_pid(), daemon);
  kill(daemon, SIGKILL);
  waitpid(daemon, nullptr, 0);
  const auto status = (*attach)->CheckAlive();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("is dead"));
  for (int fd : {ready[0], hold[0], hold[1]}) close(fd);
}

}  // namespace
}  // namespace dmuon::client
