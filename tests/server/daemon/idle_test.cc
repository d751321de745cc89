// A private daemon that nobody uses, in this process: the minute that it waits is made short.
#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <filesystem>
#include <string>

#include "server/daemon/config.h"
#include "server/daemon/daemon.h"
#include "tests/support/process.h"

namespace dmuon::server {
namespace {

TEST(Idle, APrivateDaemonEndsWhenNobodyAttaches) {
  const dmuon::testing::TemporaryDirectory parent;
  const auto loaded = LoadConfig({.flags = {{"socket_dir", parent.path() + "/run"},
                                            {"exit_when_idle", "true"},
                                            {"threads", "1"},
                                            {"calibration_file", ""}}});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  {
    Daemon daemon(loaded->config, /*first_attachment=*/absl::Milliseconds(20));
    const auto failure = daemon.Start();
    ASSERT_FALSE(failure.has_value()) << failure->status;
    const UniqueFd silent(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    EXPECT_EQ(daemon.Run(silent.get()), ExitCode::kOk);
  }
  EXPECT_TRUE(std::filesystem::is_empty(parent.path()));
}

}  // namespace
}  // namespace dmuon::server
