#include "server/attach/pidfd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace dmuon::server {
namespace {

// A child that lives until it is killed.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ == 0) {
      for (;;) pause();
    }
  }
  ~Child() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

bool Readable(int fd, int timeout_ms) {
  pollfd watched = {fd, POLLIN, 0};
  return poll(&watched, 1, timeout_ms) == 1;
}

TEST(PidfdByPid, IsReadableWhenTheProcessIsDeadAndNotBefore) {
  Child child;
  const auto pidfd = PidfdByPid({geteuid(), getegid(), child.pid()}, TicksSinceBoot() + 1);
  ASSERT_TRUE(pidfd.ok()) << pidfd.status();
  EXPECT_FALSE(Readable(pidfd->get(), 0));
  child.Kill();
  EXPECT_TRUE(Readable(pidfd->get(), 5000));
}

TEST(PidfdByPid, AProcessThatIsYoungerThanTheConnectionIsAnother) {
  Child child;
  const auto pidfd = PidfdByPid({geteuid(), getegid(), child.pid()}, /*connected_ticks=*/1);
  EXPECT_EQ(pidfd.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(PidfdByPid, AProcessOfAnotherUserIsAnother) {
  if (geteuid() == 0)
    GTEST_SKIP() << "root's processes look the same as those that are not dumpable";
  Child child;
  const auto pidfd = PidfdByPid({geteuid() + 1, getegid(), child.pid()}, TicksSinceBoot() + 1);
  EXPECT_EQ(pidfd.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(PidfdByPid, AnUnseenProcessSaysWhatToDoAboutIt) {
  const absl::Status status = PidfdByPid({0, 0, 0}, TicksSinceBoot()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("hostPID"));
}

TEST(PeerPidfd, TheProcessThatMadeTheConnectionLives) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const UniqueFd ours(pair[0]), theirs(pair[1]);
  const auto pidfd = PeerPidfd(ours.get(), {geteuid(), getegid(), getpid()});
  ASSERT_TRUE(pidfd.ok()) << pidfd.status();
  EXPECT_FALSE(Readable(pidfd->get(), 0));
}

TEST(PeerPidfd, AProcessThatTheKernelDoesNotNameIsRefusedThoughItCouldBeWatched) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const UniqueFd ours(pair[0]), theirs(pair[1]);
  const absl::Status status = PeerPidfd(ours.get(), {geteuid(), getegid(), 0}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("hostPID"));
}

}  // namespace
}  // namespace dmuon::server
