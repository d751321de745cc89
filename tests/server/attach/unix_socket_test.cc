#include "base/unix_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/support/process.h"

namespace dmuon {
namespace {

using ::testing::HasSubstr;

class UnixSocket : public ::testing::Test {
 protected:
  std::string path() const { return dir_.path() + "/s"; }
  const dmuon::testing::TemporaryDirectory dir_;
};

TEST_F(UnixSocket, HasTheModeThatWasAskedForWhateverTheUmask) {
  const mode_t before = umask(0077);
  const auto fd = ListenUnix(path(), SOCK_STREAM, 0660);
  umask(before);
  ASSERT_TRUE(fd.ok()) << fd.status();
  struct stat found;
  ASSERT_EQ(stat(path().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 07777, 0660u);
  EXPECT_NE(fcntl(fd->get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(UnixSocket, ADeadSocketIsReplacedAndAFileIsNot) {
  ASSERT_TRUE(ListenUnix(path(), SOCK_STREAM, 0600).ok());  // closed at once: the path stays
  EXPECT_TRUE(ListenUnix(path(), SOCK_STREAM, 0600).ok());
  unlink(path().c_str());
  std::ofstream(path()) << "precious";
  const absl::Status status = ListenUnix(path(), SOCK_STREAM, 0600).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("not a socket"));
}

TEST_F(UnixSocket, ATooLongPathIsNamedWithItsLength) {
  const absl::Status status =
      ListenUnix("/tmp/" + std::string(200, 'x'), SOCK_STREAM, 0600).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has 205"));
}

TEST(PeerCredentials, AreThoseOfTheProcessThatConnected) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const UniqueFd a(pair[0]), b(pair[1]);
  const auto peer = ReadPeerCredentials(a.get());
  ASSERT_TRUE(peer.ok());
  EXPECT_EQ(peer->uid, geteuid());
  EXPECT_EQ(peer->pid, getpid());
}

TEST(UidPolicy, TheListAddsToOwnAndRoot) {
  const UidPolicy policy({4711});
  EXPECT_TRUE(policy.Allows(geteuid()));
  EXPECT_TRUE(policy.Allows(0));
  EXPECT_TRUE(policy.Allows(4711));
  EXPECT_FALSE(policy.Allows(4712));
}

TEST(UidPolicy, AnEmptyListAllowsWhoeverCanOpenTheSocketButNotTheOverflowUid) {
  const UidPolicy policy;
  EXPECT_TRUE(policy.Allows(4712));
  unsigned overflow = 0;
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  ASSERT_NE(overflow, 0u);
  EXPECT_FALSE(policy.Allows(overflow));
  EXPECT_FALSE(UidPolicy({overflow}).Allows(overflow));
}

}  // namespace
}  // namespace dmuon
