// What every end-to-end test has: a daemon, and another session on it that must be unharmed when the test is over, with
// nothing left behind.
#ifndef DMUON_TESTS_E2E_E2E_TEST_BASE_H_
#define DMUON_TESTS_E2E_E2E_TEST_BASE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "dmuon/v1/admin.pb.h"
#include "tests/support/daemon_process.h"
#include "tests/support/trainer.h"

namespace dmuon::testing {

class E2eTest : public ::testing::Test {
 protected:
  struct Options {
    std::vector<std::string> daemon_flags;
    bool shared = false;
    bool bystander = true;
  };
  E2eTest() : E2eTest(Options()) {}
  explicit E2eTest(const Options& options);
  ~E2eTest() override;

  // Starts the bystander and takes the daemon's measure.
  void SetUp() override;
  // The daemon lives, the bystander steps, all other sessions are gone, and the daemon holds what it held before.
  void TearDown() override;
  // Whether the daemon computes on a device (DMUON_TEST_BACKEND): what only the host's memory has is skipped there.
  static bool OnDevice();
  // For a test that ends the daemon itself.
  void NoDaemonLeft() { daemon_ends_ = true; }

  const std::string& endpoint() const { return daemon_->endpoint(); }
  DaemonProcess& daemon() { return *daemon_; }
  // What the daemon held when only the bystander was there.
  const ProcessUse& before() const { return before_; }
  std::vector<v1::SessionSummary> Sessions();
  // The session's summary, or one of state UNSPECIFIED when there is none.
  v1::SessionSummary Summary(const std::string& name);
  // A helper process that is one rank; see trainer_main.cc for the modes.
  ChildProcess Helper(const std::string& mode, const JobOptions& job, int rank,
                      const SpawnOptions& options = {});
  std::string HelperProgram() const;

 private:
  const Options options_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Trainer> bystander_;
  ProcessUse before_;
  bool daemon_ends_ = false;
};

}  // namespace dmuon::testing

#endif  // DMUON_TESTS_E2E_E2E_TEST_BASE_H_
