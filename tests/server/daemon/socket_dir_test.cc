#include "server/daemon/socket_dir.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/process.h"

namespace dmuon::server {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class SocketDirTest : public ::testing::Test {
 protected:
  std::string dir() const { return parent_.path() + "/run"; }
  dmuon::testing::TemporaryDirectory parent_;
};

mode_t ModeOf(const std::string& path) {
  struct stat found;
  return stat(path.c_str(), &found) == 0 ? found.st_mode & 07777 : 0;
}

TEST_F(SocketDirTest, IsMadeWithItsModeAndGoneAfterwards) {
  const mode_t before = umask(0077);
  {
    const auto made = SocketDir::Acquire(dir(), 0750);
    umask(before);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(ModeOf(dir()), 0750u);
    ASSERT_EQ(mknod(made->attach_path().c_str(), S_IFSOCK | 0600, 0), 0);
    ASSERT_EQ(mknod(made->control_path().c_str(), S_IFSOCK | 0600, 0), 0);
  }
  EXPECT_FALSE(fs::exists(dir()));
}

TEST_F(SocketDirTest, OneThatWasThereStaysWithItsMode) {
  fs::create_directory(dir());
  chmod(dir().c_str(), 0711);
  {
    const auto found = SocketDir::Acquire(dir(), 0750);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(ModeOf(dir()), 0711u);
  }
  EXPECT_TRUE(fs::is_empty(dir()));
}

TEST_F(SocketDirTest, ASecondDaemonIsRefusedWithThePidOfTheFirst) {
  auto first = std::make_unique<SocketDir>(SocketDir::Acquire(dir(), 0750).value());
  const absl::Status status = SocketDir::Acquire(dir(), 0750).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("pid ", getpid())));
  EXPECT_TRUE(fs::exists(dir() + "/dmuond.lock"));  // the refused one took nothing away
  first.reset();
  EXPECT_TRUE(SocketDir::Acquire(dir(), 0750).ok());
}

TEST_F(SocketDirTest, WhatADeadDaemonLeftIsNoObstacle) {
  fs::create_directory(dir());
  std::ofstream(dir() + "/dmuond.lock") << "99999999\n";
  EXPECT_TRUE(SocketDir::Acquire(dir(), 0750).ok());
}

TEST_F(SocketDirTest, WhatIsNotItsOwnStays) {
  {
    absl::StatusOr<SocketDir> first = SocketDir::Acquire(dir(), 0750);
    ASSERT_TRUE(first.ok());
    std::ofstream(dir() + "/control.sock") << "a file";
  }
  EXPECT_TRUE(fs::exists(dir() + "/control.sock"));
  fs::remove_all(dir());

  // Somebody removes the folder of a live daemon, and another daemon makes it anew.
  auto first = std::make_unique<absl::StatusOr<SocketDir>>(SocketDir::Acquire(dir(), 0750));
  ASSERT_TRUE(first->ok());
  fs::remove_all(dir());
  absl::StatusOr<SocketDir> second = SocketDir::Acquire(dir(), 0750);
  ASSERT_TRUE(second.ok());
  first.reset();
  EXPECT_TRUE(fs::exists(dir() + "/dmuond.lock"));
}

TEST_F(SocketDirTest, ADirectoryThatIsNotToBeTrustedIsRefused) {
  fs::create_directory(dir());
  chmod(dir().c_str(), 0777);
  absl::Status status = SocketDir::Acquire(dir(), 0750).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("given 0777"));
  chmod(dir().c_str(), 0750);
  if (geteuid() == 0) {
    ASSERT_EQ(chown(dir().c_str(), 4711, static_cast<gid_t>(-1)), 0);
    status = SocketDir::Acquire(dir(), 0750).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("given 4711"));
  }
  fs::remove(dir());
  std::ofstream(dir()) << "a file";
  EXPECT_EQ(SocketDir::Acquire(dir(), 0750).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SocketDirTest, AParentThatIsNotThereIsNamed) {
  const absl::Status status = SocketDir::Acquire(parent_.path() + "/no/run", 0750).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/no/run"));
}

}  // namespace
}  // namespace dmuon::server
