// Trainers here are this process and forked children, over a real socket.
#include "server/attach/attach_server.h"

#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "tests/support/process.h"

namespace dmuon::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using wire::AttachFrame;
using wire::AttachType;

constexpr absl::Duration kSoon = absl::Seconds(10);

UniqueFd Connect(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0)
    return UniqueFd();
  return fd;
}

AttachFrame FrameOf(AttachType type) {
  AttachFrame frame;
  frame.type = type;
  return frame;
}

struct Answer {
  bool closed = false;
  AttachFrame frame;
  UniqueFd fd;
};

// Blocks. `closed` when the other side has closed.
Answer Receive(int socket) {
  Answer answer;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  iovec io{&answer.frame, sizeof(answer.frame)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  answer.closed = recvmsg(socket, &message, MSG_CMSG_CLOEXEC) <= 0;
  if (cmsghdr* c = CMSG_FIRSTHDR(&message);
      !answer.closed && c != nullptr && c->cmsg_type == SCM_RIGHTS) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(c), sizeof(fd));
    answer.fd.Reset(fd);
  }
  return answer;
}

void SendBytes(int socket, const void* data, size_t size) {
  ASSERT_EQ(send(socket, data, size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
}

Answer Ask(int socket, const AttachFrame& frame) {
  SendBytes(socket, &frame, sizeof(frame));
  return Receive(socket);
}

int OpenDescriptors() {
  int count = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

class AttachServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    arena_.Reset(memfd_create("arena", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(arena_.get(), 4096), 0);
  }
  void TearDown() override { server_.reset(); }

  void Start(AttachOptions options = {}) {
    auto listener = ListenUnix(path(), SOCK_SEQPACKET, 0600);
    ASSERT_TRUE(listener.ok()) << listener.status();
    options.daemon_version = "1.2.3";
    AttachHandlers handlers;
    handlers.arena = [this](const Trainer& trainer, SessionId session, int rank,
                            wire::ArenaKind kind) -> absl::StatusOr<ArenaHandle> {
      if (session != SessionId(7)) return absl::NotFoundError("no session 8");
      asked_ = absl::StrCat(trainer.pid, " ", rank, " ", static_cast<int>(kind));
      return ArenaHandle{UniqueFd(fcntl(arena_.get(), F_DUPFD_CLOEXEC, 0)), 4096};
    };
    handlers.gone = [this](AttachmentId id) {
      absl::MutexLock lock(&mu_);
      gone_.push_back(id);
    };
    auto server = AttachServer::Start(*std::move(listener), attachments_, std::move(options),
                                      std::move(handlers));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // Whether `count` attachments have ended within the patience of the test.
  bool GoneIs(size_t count) {
    absl::MutexLock lock(&mu_);
    const auto reached = [&] { return gone_.size() >= count; };
    return mu_.AwaitWithTimeout(absl::Condition(&reached), kSoon) && gone_.size() == count;
  }
  size_t gone() {
    absl::MutexLock lock(&mu_);
    return gone_.size();
  }

  UniqueFd Attached() {
    UniqueFd fd = Connect(path());
    EXPECT_EQ(Ask(fd.get(), FrameOf(AttachType::kHello)).frame.type, AttachType::kWelcome);
    return fd;
  }

  // One frame that is refused: the ERROR, after which the connection is closed.
  void ExpectRefused(int socket, const AttachFrame& frame, absl::StatusCode code,
                     const std::string& text) {
    const Answer answer = Ask(socket, frame);
    ASSERT_FALSE(answer.closed);
    EXPECT_EQ(answer.frame.type, AttachType::kError);
    EXPECT_EQ(answer.frame.code, static_cast<uint32_t>(code)) << answer.frame.text;
    EXPECT_THAT(answer.frame.text, HasSubstr(text));
    EXPECT_TRUE(Receive(socket).closed);
  }

  std::string path() const { return dir_.path() + "/attach.sock"; }

  const dmuon::testing::TemporaryDirectory dir_;
  UniqueFd arena_;
  std::string asked_;
  Attachments attachments_;
  absl::Mutex mu_;
  std::vector<AttachmentId> gone_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<AttachServer> server_;
};

// A child that attaches, and then lives until it is killed. `heir`: a grandchild inherits the socket and outlives it.
class TrainerProcess {
 public:
  TrainerProcess(const std::string& path, bool heir) {
    int pipe_fds[2];
    EXPECT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
    UniqueFd from(pipe_fds[0]), to(pipe_fds[1]);
    pid_ = fork();
    if (pid_ == 0) {
      const UniqueFd socket = Connect(path);
      const AttachFrame hello = FrameOf(AttachType::kHello);
      AttachFrame welcome;
      if (send(socket.get(), &hello, sizeof(hello), 0) < 0 ||
          recv(socket.get(), &welcome, sizeof(welcome), 0) <= 0 ||
          welcome.type != AttachType::kWelcome) {
        _exit(1);
      }
      const pid_t heir_pid = heir ? fork() : -1;
      if (heir_pid != 0 && write(to.get(), &heir_pid, sizeof(heir_pid)) < 0) _exit(1);
      for (;;) pause();
    }
    to.Reset();
    attached_ = read(from.get(), &heir_, sizeof(heir_)) == sizeof(heir_);
  }
  ~TrainerProcess() {
    Kill();
    if (heir_ > 0) kill(heir_, SIGKILL);
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  bool attached() const { return attached_; }

 private:
  pid_t pid_ = -1;
  pid_t heir_ = -1;
  bool attached_ = false;
};

TEST_F(AttachServerTest, HelloIsAnsweredByAFreshTokenAndTheDaemonsVersion) {
  Start();
  const UniqueFd a = Connect(path()), b = Connect(path());
  const Answer first = Ask(a.get(), FrameOf(AttachType::kHello)),
               second = Ask(b.get(), FrameOf(AttachType::kHello));
  EXPECT_EQ(first.frame.type, AttachType::kWelcome);
  EXPECT_STREQ(first.frame.text, "1.2.3");
  EXPECT_NE(std::memcmp(first.frame.token, second.frame.token, wire::kTokenBytes), 0);
  EXPECT_EQ(attachments_.size(), 2);
}

TEST_F(AttachServerTest, FetchIsAnsweredByTheArenaAndItsDescriptor) {
  Start();
  const UniqueFd fd = Attached();
  AttachFrame fetch = FrameOf(AttachType::kFetch);
  fetch.session = 7;
  fetch.rank = 3;
  fetch.arena = wire::ArenaKind::kWeight;
  const Answer answer = Ask(fd.get(), fetch);
  ASSERT_EQ(answer.frame.type, AttachType::kArena) << answer.frame.text;
  EXPECT_EQ(answer.frame.bytes, 4096u);
  EXPECT_EQ(answer.frame.session, 7u);
  EXPECT_EQ(answer.frame.rank, 3u);
  EXPECT_EQ(answer.frame.arena, wire::ArenaKind::kWeight);
  EXPECT_EQ(asked_, absl::StrCat(getpid(), " 3 3"));
  struct stat ours, theirs;
  ASSERT_EQ(fstat(arena_.get(), &ours), 0);
  ASSERT_EQ(fstat(answer.fd.get(), &theirs), 0);
  EXPECT_EQ(ours.st_ino, theirs.st_ino);
}

TEST_F(AttachServerTest, AFetchThatFailsIsAnErrorAndTheConnectionGoesOn) {
  Start();
  const UniqueFd fd = Attached();
  AttachFrame fetch = FrameOf(AttachType::kFetch);
  fetch.session = 8;
  fetch.arena = wire::ArenaKind::kGrad;
  for (int i = 0; i < 2; ++i) {
    const Answer answer = Ask(fd.get(), fetch);
    EXPECT_EQ(answer.frame.type, AttachType::kError);
    EXPECT_EQ(answer.frame.code, static_cast<uint32_t>(absl::StatusCode::kNotFound));
    EXPECT_STREQ(answer.frame.text, "no session 8");
    EXPECT_FALSE(answer.fd.valid());
  }
}

TEST_F(AttachServerTest, EachMalformedFrameIsAnErrorWithItsReasonThenTheEnd) {
  Start();
  AttachFrame frame = FrameOf(AttachType::kHello);
  frame.magic = 1;
  ExpectRefused(Connect(path()).get(), frame, absl::StatusCode::kInvalidArgument, "magic");
  frame = FrameOf(AttachType::kHello);
  frame.version = 9;
  ExpectRefused(Connect(path()).get(), frame, absl::StatusCode::kFailedPrecondition,
                "expected 1, given 9");
  frame = FrameOf(AttachType::kHello);
  std::memset(frame.client, 'x', sizeof(frame.client));
  ExpectRefused(Connect(path()).get(), frame, absl::StatusCode::kInvalidArgument, "no end");
  for (AttachType type :
       {AttachType::kUnspecified, AttachType::kWelcome, AttachType::kError, AttachType{77}}) {
    ExpectRefused(Connect(path()).get(), FrameOf(type), absl::StatusCode::kInvalidArgument,
                  "expected HELLO or FETCH");
  }
  ExpectRefused(Connect(path()).get(), FrameOf(AttachType::kFetch),
                absl::StatusCode::kFailedPrecondition, "before HELLO");
  const UniqueFd twice = Attached();
  ExpectRefused(twice.get(), FrameOf(AttachType::kHello), absl::StatusCode::kFailedPrecondition,
                "already");
  const UniqueFd arena = Attached();
  ExpectRefused(arena.get(), FrameOf(AttachType::kFetch), absl::StatusCode::kInvalidArgument,
                "given 0");
  const UniqueFd rank = Attached();
  frame = FrameOf(AttachType::kFetch);
  frame.arena = wire::ArenaKind::kGrad;
  frame.rank = 0x80000000u;
  ExpectRefused(rank.get(), frame, absl::StatusCode::kInvalidArgument, "rank");
}

TEST_F(AttachServerTest, APacketOfAnotherSizeIsAnErrorWithBothSizes) {
  Start();
  const std::vector<char> bytes(4096, 'x');
  for (size_t size : {size_t{1}, sizeof(AttachFrame) - 1, sizeof(AttachFrame) + 1, bytes.size()}) {
    const UniqueFd fd = Connect(path());
    SendBytes(fd.get(), bytes.data(), size);
    const Answer answer = Receive(fd.get());
    ASSERT_FALSE(answer.closed) << size;
    EXPECT_EQ(answer.frame.code, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(answer.frame.text, HasSubstr("expected 512 bytes"));
    EXPECT_TRUE(Receive(fd.get()).closed);
  }
}

TEST_F(AttachServerTest, AReasonIsReadThoughMoreWasSentBehindTheBadFrame) {
  Start();
  const UniqueFd fd = Connect(path());
  const AttachFrame bad = FrameOf(AttachType::kError);
  for (int i = 0; i < 20; ++i) {
    if (send(fd.get(), &bad, sizeof(bad), MSG_NOSIGNAL) < 0) break;
  }
  EXPECT_EQ(Receive(fd.get()).frame.type, AttachType::kError);
}

TEST_F(AttachServerTest, DescriptorsThatATrainerSendsAreClosedAndRefused) {
  Start();
  const UniqueFd fd = Attached();
  int pipe_fds[2];
  ASSERT_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
  const UniqueFd from(pipe_fds[0]);
  UniqueFd to(pipe_fds[1]);
  constexpr int kCount = 253;  // as many as a packet can carry
  AttachFrame frame = FrameOf(AttachType::kFetch);
  alignas(cmsghdr) char control[CMSG_SPACE(kCount * sizeof(int))] = {};
  iovec io{&frame, sizeof(frame)};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(kCount * sizeof(int));
  for (int i = 0; i < kCount; ++i)
    std::memcpy(CMSG_DATA(c) + i * sizeof(int), &pipe_fds[1], sizeof(int));
  ASSERT_EQ(sendmsg(fd.get(), &message, 0), static_cast<ssize_t>(sizeof(frame)));
  const Answer answer = Receive(fd.get());
  EXPECT_EQ(answer.frame.code, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(answer.frame.text, HasSubstr("takes no descriptors"));
  // None is left open in the daemon: the reading end sees the end of the pipe.
  to.Reset();
  pollfd watched = {from.get(), POLLIN, 0};
  ASSERT_EQ(poll(&watched, 1, 10000), 1);
  EXPECT_NE(watched.revents & POLLHUP, 0);
}

TEST_F(AttachServerTest, ADeathEndsTheAttachmentThoughAChildHoldsTheSocket) {
  Start();
  TrainerProcess trainer(path(), /*heir=*/true);
  ASSERT_TRUE(trainer.attached());
  EXPECT_EQ(attachments_.size(), 1);
  EXPECT_EQ(gone(), 0u);
  trainer.Kill();
  EXPECT_TRUE(GoneIs(1));
  EXPECT_EQ(attachments_.size(), 0);
}

TEST_F(AttachServerTest, ADeathIsRepeatedWhileACallOfTheDeadRuns) {
  Start();
  UniqueFd fd = Connect(path());
  const Answer welcome = Ask(fd.get(), FrameOf(AttachType::kHello));
  const std::string token = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(welcome.frame.token), wire::kTokenBytes));
  ASSERT_TRUE(attachments_.BeginCall(token).ok());
  fd.Reset();
  absl::MutexLock lock(&mu_);
  const auto repeated = [&] { return gone_.size() >= 5; };
  EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&repeated), kSoon));
  EXPECT_THAT(gone_, ::testing::Each(AttachmentId(1)));
  EXPECT_FALSE(attachments_.EndCall(AttachmentId(1)));
}

TEST_F(AttachServerTest, TheEndOfTheConnectionEndsAnAttachmentThatIsInNoSession) {
  Start();
  UniqueFd fd = Attached();
  fd.Reset();
  EXPECT_TRUE(GoneIs(1));
  EXPECT_EQ(attachments_.size(), 0);
}

TEST_F(AttachServerTest, TheEndOfTheConnectionIsNotTheEndOfATrainerInASession) {
  Start();
  UniqueFd in_session = Connect(path());
  const Answer welcome = Ask(in_session.get(), FrameOf(AttachType::kHello));
  attachments_.Entered(AttachmentId(1), SessionId(7));
  in_session.Reset();
  // A second one that comes and goes: its end is seen after that of the first.
  UniqueFd other = Attached();
  other.Reset();
  ASSERT_TRUE(GoneIs(1));
  {
    absl::MutexLock lock(&mu_);
    EXPECT_THAT(gone_, ElementsAre(AttachmentId(2)));
  }
  EXPECT_EQ(attachments_.size(), 1);
  // With its session it is over: this process lives on, and nothing would be heard of it again.
  attachments_.Left(AttachmentId(1), SessionId(7));
  EXPECT_TRUE(GoneIs(2));
  EXPECT_EQ(attachments_.size(), 0);
}

TEST_F(AttachServerTest, ASilentConnectionIsClosedWithAReason) {
  Start({.hello_timeout = absl::Milliseconds(20)});
  const UniqueFd silent = Connect(path());
  const Answer answer = Receive(silent.get());
  EXPECT_EQ(answer.frame.code, static_cast<uint32_t>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(Receive(silent.get()).closed);
  EXPECT_EQ(gone(), 0u);
}

TEST_F(AttachServerTest, AnAttachedTrainerMayBeSilent) {
  Start({.hello_timeout = absl::Milliseconds(20)});
  const UniqueFd attached = Attached();
  const UniqueFd silent = Connect(path());
  EXPECT_EQ(Receive(silent.get()).frame.code,
            static_cast<uint32_t>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(attachments_.size(), 1);
}

TEST_F(AttachServerTest, ConnectionsThatSayNothingHaveALimit) {
  Start({.max_unattached = 2});
  const UniqueFd a = Connect(path()), b = Connect(path()), c = Connect(path());
  const Answer answer = Receive(c.get());
  EXPECT_EQ(answer.frame.code, static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(Ask(a.get(), FrameOf(AttachType::kHello)).frame.type, AttachType::kWelcome);
}

TEST_F(AttachServerTest, AUserWhoIsNotListedIsRefusedByName) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  Start({.uids = UidPolicy({4711})});
  ASSERT_EQ(chmod(dir_.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(path().c_str(), 0666), 0);
  for (uid_t uid : {4711u, 4712u}) {
    const pid_t pid = fork();
    if (pid == 0) {
      if (setuid(uid) != 0) _exit(1);
      const UniqueFd fd = Connect(path());
      const AttachFrame hello = FrameOf(AttachType::kHello);
      (void)!send(fd.get(), &hello, sizeof(hello), MSG_NOSIGNAL);
      AttachFrame frame;
      if (recv(fd.get(), &frame, sizeof(frame), 0) <= 0) _exit(2);
      if (frame.type == AttachType::kWelcome) _exit(10);
      _exit(frame.code == static_cast<uint32_t>(absl::StatusCode::kPermissionDenied) &&
                    std::strstr(frame.text, "4712") != nullptr
                ? 11
                : 3);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(WEXITSTATUS(status), uid == 4711 ? 10 : 11);
  }
}

TEST_F(AttachServerTest, FiftyRoundsOfAttachAndKillLeaveDescriptorsFlat) {
  Start();
  size_t rounds = 0;
  int before = 0;
  for (int i = 0; i < 55; ++i) {
    if (i == 5) before = OpenDescriptors();
    TrainerProcess trainer(path(), /*heir=*/i % 5 == 0);
    ASSERT_TRUE(trainer.attached());
    trainer.Kill();
    ASSERT_TRUE(GoneIs(++rounds));
  }
  EXPECT_EQ(OpenDescriptors(), before);
  EXPECT_EQ(attachments_.size(), 0);
}

TEST_F(AttachServerTest, StopClosesAllConnections) {
  Start();
  const UniqueFd fd = Attached();
  server_.reset();
  EXPECT_TRUE(Receive(fd.get()).closed);
}

}  // namespace
}  // namespace dmuon::server
