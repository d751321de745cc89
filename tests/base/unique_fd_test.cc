#include "base/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <utility>

namespace dmuon {
namespace {

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) != -1; }
UniqueFd OpenNull() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

TEST(UniqueFd, ClosesAtTheEndOfItsLife) {
  int fd;
  {
    const UniqueFd owner = OpenNull();
    ASSERT_TRUE(owner.valid());
    fd = owner.get();
    EXPECT_TRUE(IsOpen(fd));
  }
  EXPECT_FALSE(IsOpen(fd));
}

TEST(UniqueFd, AMoveLeavesTheSourceEmptyAndClosesWhatTheTargetHeld) {
  UniqueFd a = OpenNull();
  UniqueFd b = OpenNull();
  const int from = a.get();
  const int replaced = b.get();
  b = std::move(a);
  EXPECT_EQ(b.get(), from);
  EXPECT_FALSE(IsOpen(replaced));
  EXPECT_TRUE(IsOpen(from));
}

TEST(UniqueFd, AMoveOntoItselfKeepsTheDescriptorOpen) {
  UniqueFd a = OpenNull();
  UniqueFd& same = a;
  const int fd = a.get();
  a = std::move(same);
  EXPECT_EQ(a.get(), fd);
  EXPECT_TRUE(IsOpen(fd));
}

TEST(UniqueFd, ReleaseHandsTheDescriptorOver) {
  UniqueFd a = OpenNull();
  const UniqueFd again(a.Release());
  EXPECT_FALSE(a.valid());
  EXPECT_TRUE(IsOpen(again.get()));
}

}  // namespace
}  // namespace dmuon
