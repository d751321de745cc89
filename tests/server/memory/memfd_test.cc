#include "server/memory/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

TEST(SealedMemory, IsZeroedSharedAndCannotShrinkOrGrow) {
  absl::StatusOr<SealedMemory> memory = SealedMemory::Create("test", 8192);
  ASSERT_TRUE(memory.ok());
  EXPECT_TRUE(std::all_of(memory->data(), memory->data() + 8192,
                          [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_EQ(ftruncate(memory->fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(memory->fd(), 16384), -1);
  EXPECT_EQ(fcntl(memory->fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  auto* other =
      static_cast<std::byte*>(mmap(nullptr, 8192, PROT_READ, MAP_SHARED, memory->fd(), 0));
  memory->data()[100] = std::byte{7};
  EXPECT_EQ(other[100], std::byte{7});
  munmap(other, 8192);
}

TEST(SealedMemory, MoreThanTheMachineHasIsResourceExhausted) {
  EXPECT_EQ(SealedMemory::Create("huge", size_t{1} << 46).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(SealedMemory, MovingLeavesOneOwner) {
  SealedMemory a = *SealedMemory::Create("a", 4096);
  std::byte* data = a.data();
  SealedMemory b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);
}

}  // namespace
}  // namespace dmuon::server
