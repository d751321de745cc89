// A daemon in the test's own process, on the stand-ins for CUDA, so that the test can ask these what it did.
#ifndef DMUON_TESTS_E2E_DAEMON_HERE_H_
#define DMUON_TESTS_E2E_DAEMON_HERE_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "server/daemon/config.h"
#include "server/daemon/daemon.h"

namespace dmuon::testing {

// Null, and the test has failed, when it does not start.
inline std::unique_ptr<server::Daemon> StartDaemonHere(const std::string& socket_dir) {
  auto loaded = server::LoadConfig({.flags = {{"socket_dir", socket_dir},
                                              {"socket_mode", "0700"},
                                              {"backend", "cuda"},
                                              {"threads", "1"},
                                              {"calibration_file", ""}}});
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  if (!loaded.ok()) return nullptr;
  auto daemon = std::make_unique<server::Daemon>(loaded->config);
  const auto failure = daemon->Start();
  EXPECT_FALSE(failure.has_value()) << failure->status;
  return failure.has_value() ? nullptr : std::move(daemon);
}

}  // namespace dmuon::testing

#endif  // DMUON_TESTS_E2E_DAEMON_HERE_H_
