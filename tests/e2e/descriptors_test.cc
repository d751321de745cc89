// A daemon that has no descriptors left.
#include <sys/resource.h>
#include <sys/socket.h>

#include "base/unique_fd.h"
#include "client/endpoint.h"
#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

size_t Count(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

class Descriptors : public E2eTest {
 protected:
  void Limit(rlim_t descriptors) {
    rlimit limit{};
    ASSERT_EQ(prlimit(daemon().pid(), RLIMIT_NOFILE, nullptr, &limit), 0);
    limit.rlim_cur = descriptors;
    ASSERT_EQ(prlimit(daemon().pid(), RLIMIT_NOFILE, &limit, nullptr), 0);
  }
};

TEST_F(Descriptors, RunOutIsLoggedOnceAndTheDaemonGoesOnWhenThereAreSome) {
  if (OnDevice()) GTEST_SKIP() << "a driver holds descriptors of its own";
  Limit(3);  // what is open stays open, and nothing can be opened
  const client::Endpoint at{endpoint()};
  std::vector<UniqueFd> taken;
  const auto connect = [&](const std::string& path, int type) {
    auto fd = client::ConnectUnix(at, path, type, absl::Seconds(5));
    ASSERT_TRUE(fd.ok()) << fd.status();
    taken.push_back(*std::move(fd));
  };
  for (int i = 0; i < 4; ++i) connect(at.attach_path(), SOCK_SEQPACKET);
  EXPECT_TRUE(Eventually([&] { return Count(daemon().Log(), "attach_accept_failed") == 1; }));
  for (int i = 0; i < 4; ++i) connect(at.control_path(), SOCK_STREAM);
  EXPECT_TRUE(Eventually([&] { return Count(daemon().Log(), "control_accept_failed") == 1; }));
  // Both are tried ten times a second.
  EXPECT_FALSE(Eventually([&] { return Count(daemon().Log(), "accept_failed") > 2; },
                          absl::Milliseconds(500)));
  Limit(1024);
  EXPECT_TRUE(Eventually([&] {
    const std::string log = daemon().Log();
    return Count(log, "attach_accept_resumed") == 1 && Count(log, "control_accept_resumed") == 1;
  }));
  auto ranks = StartAll(endpoint(), {.job = "after", .world = 1});
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

}  // namespace
}  // namespace dmuon::testing
