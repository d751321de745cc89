#include "server/session/registration.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "server/session/namespaces.h"

namespace dmuon::server {
namespace {

using ::testing::HasSubstr;

constexpr char kDevice[] = "GPU-00000000-0000-0000-0000-000000000001";

std::vector<Buffer> Good() {
  return {{wire::ArenaKind::kControl, 0, 4096},
          {wire::ArenaKind::kGrad, 0, 8192, std::string(64, 'g'), kDevice},
          {wire::ArenaKind::kWeight, 256, 12288, std::string(64, 'w'), kDevice}};
}

struct Case {
  const char* name;
  std::function<void(std::vector<Buffer>&)> damage;
  absl::StatusCode code;
  const char* text;
};

TEST(CheckBuffers, WithHandlesEachWrongFieldIsNamedWithBothValues) {
  const ExpectedBuffers expected{4096, 8192, 12288, true, kDevice};
  EXPECT_TRUE(CheckBuffers(Good(), expected).ok());
  const absl::StatusCode invalid = absl::StatusCode::kInvalidArgument;
  const Case cases[] = {
      {"no grad", [](auto& b) { b.erase(b.begin() + 1); }, invalid,
       "'grad': expected once, got 0 times"},
      {"two weights", [](auto& b) { b.push_back(b[2]); }, invalid,
       "'weight': expected once, got 2 times"},
      {"sealed grad", [](auto& b) { b[1].ipc_handle.clear(); },
       absl::StatusCode::kFailedPrecondition, "'grad': ipc_handle: expected a handle"},
      {"control on a device", [](auto& b) { b[0].ipc_handle = std::string(64, 'c'); },
       absl::StatusCode::kFailedPrecondition, "'control': expected the arena of the attach socket"},
      {"another device", [](auto& b) { b[2].device = "GPU-2"; }, invalid,
       "'weight': gpu_uuid: expected GPU-00000000-0000-0000-0000-000000000001"},
      {"size", [](auto& b) { b[1].size = 8193; }, invalid, "size: expected 8192 bytes, got 8193"},
      {"alignment", [](auto& b) { b[2].offset = 128; }, invalid,
       "offset: expected a multiple of 256, got 128"},
      {"overlap", [](auto& b) { b[2].ipc_handle = b[1].ipc_handle; }, invalid,
       "'weight': ipc_handle: expected an allocation of its own, given that of 'grad'"},
  };
  for (const Case& c : cases) {
    std::vector<Buffer> buffers = Good();
    c.damage(buffers);
    const absl::Status status = CheckBuffers(buffers, expected);
    EXPECT_EQ(status.code(), c.code) << c.name << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text)) << c.name;
  }
}

TEST(CheckBuffers, AHandleIsRefusedWhereTheArenaIsSealedMemory) {
  const ExpectedBuffers expected{4096, 8192, 12288, false, ""};
  const absl::Status status = CheckBuffers(Good(), expected);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("given a handle of device memory"));
}

TEST(NamespacesApart, NamesThoseThatAProcessDoesNotShare) {
  EXPECT_EQ(NamespacesApart(getpid()), "");
  int began[2];
  ASSERT_EQ(pipe2(began, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    const char left = unshare(CLONE_NEWIPC) == 0 ? 'y' : 'n';
    [[maybe_unused]] const ssize_t n = write(began[1], &left, 1);
    for (;;) pause();
  }
  char left = 0;
  ASSERT_EQ(read(began[0], &left, 1), 1);
  EXPECT_EQ(NamespacesApart(child), left == 'y' ? "ipc" : "");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(NamespacesApart(child), "") << "nobody is there any more";
  close(began[0]);
  close(began[1]);
}

}  // namespace
}  // namespace dmuon::server
