#include "client/mapping.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/client/fake_daemon.h"

namespace dmuon::client {
namespace {

using ::testing::HasSubstr;

TEST(Mapping, SharesSealedMemory) {
  const UniqueFd memory = SealedMemory(8192);
  auto a = Mapping::Map(UniqueFd(dup(memory.get())), 8192, "GRAD");
  auto b = Mapping::Map(UniqueFd(dup(memory.get())), 8192, "GRAD");
  ASSERT_TRUE(a.ok() && b.ok());
  a->base()[5000] = std::byte{7};
  EXPECT_EQ(b->base()[5000], std::byte{7});
}

TEST(Mapping, KeepsNoDescriptor) {
  const UniqueFd memory = SealedMemory(4096);
  const int raw = dup(memory.get());
  const auto mapping = Mapping::Map(UniqueFd(raw), 4096, "GRAD");
  ASSERT_TRUE(mapping.ok());
  EXPECT_EQ(fcntl(raw, F_GETFD), -1);
}

TEST(Mapping, RefusesMemoryThatCanBeShrunkUnderIt) {
  UniqueFd fd(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  const auto status = Mapping::Map(std::move(fd), 4096, "GRAD").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected sealed memory"));
}

TEST(Mapping, RefusesADescriptorThatIsNoMemfd) {
  const auto status =
      Mapping::Map(UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC)), 0, "WEIGHT").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no memfd"));
}

TEST(Mapping, RefusesAnotherSizeThanTheLayouts) {
  const auto status = Mapping::Map(SealedMemory(4096), 8192, "WEIGHT").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected 8192 bytes, got 4096"));
}

TEST(Mapping, AnArenaOfNoBytesIsNoError) {
  const auto mapping = Mapping::Map(SealedMemory(0), 0, "GRAD");
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  EXPECT_EQ(mapping->bytes(), 0u);
}

}  // namespace
}  // namespace dmuon::client
