// One rank whose session is configured and not started, for what can be done in between.
#ifndef DMUON_TESTS_E2E_CONFIGURED_RANK_H_
#define DMUON_TESTS_E2E_CONFIGURED_RANK_H_

#include <memory>
#include <string>

#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {

class ConfiguredRank : public E2eTest {
 protected:
  void Configure(const std::string& job) {
    connection_ = *client::Connection::Open(endpoint());
    auto session = connection_->OpenSession(SmallTable({.job = job}, 0));
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    const absl::Status configured = session_->Configure(SmallOptimizer());
    ASSERT_TRUE(configured.ok()) << configured;
  }
  void TearDown() override {
    session_.reset();
    connection_.reset();
    E2eTest::TearDown();
  }

  std::unique_ptr<client::Connection> connection_;
  std::unique_ptr<client::Session> session_;
};

}  // namespace dmuon::testing

#endif  // DMUON_TESTS_E2E_CONFIGURED_RANK_H_
