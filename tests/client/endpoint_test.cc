#include "client/endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "client/dmuon/client.h"
#include "tests/client/fake_daemon.h"

namespace dmuon::client {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Endpoint, IsADirectoryWithOrWithoutUnix) {
  for (const char* text : {"/run/dmuon", "unix:/run/dmuon", "/run/dmuon/", "/run/./dmuon"}) {
    const auto endpoint = ParseEndpoint(text);
    ASSERT_TRUE(endpoint.ok()) << text << ": " << endpoint.status();
    EXPECT_EQ(endpoint->attach_path(), "/run/dmuon/attach.sock") << text;
    EXPECT_EQ(endpoint->control_path(), "/run/dmuon/control.sock") << text;
  }
}

TEST(Endpoint, ARelativeDirectoryStaysTheSameAfterChdir) {
  const auto endpoint = ParseEndpoint("./sockets");
  ASSERT_TRUE(endpoint.ok());
  EXPECT_EQ(endpoint->directory, (std::filesystem::current_path() / "sockets").string());
}

TEST(Endpoint, HostAndPortIsNotBuiltYet) {
  EXPECT_EQ(ParseEndpoint("node7:7070").status().code(), absl::StatusCode::kUnimplemented);
}

TEST(Endpoint, RefusesWhatCannotBeASocketsDirectory) {
  EXPECT_EQ(ParseEndpoint("").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseEndpoint("unix:").status().code(), absl::StatusCode::kInvalidArgument);
  const auto status = ParseEndpoint("/" + std::string(120, 'a')).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("108"));
}

TEST(Connect, NoDaemonIsUnavailableAndSaysWhereAndHowToStartOne) {
  const TemporaryDirectory directory;
  const auto status = Connection::Open(directory.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(directory.path() + "/attach.sock"), HasSubstr("dmuond --socket-dir"),
                    HasSubstr("systemctl"), HasSubstr("DMUON_ENDPOINT")));
}

TEST(Connect, ASocketInPlaceOfItsDirectoryIsNamedSo) {
  const TemporaryDirectory directory;
  const FakeAttachServer server(Endpoint{directory.path()}, Welcome);
  const std::string socket = directory.path() + "/attach.sock";
  const auto status = Connection::Open(socket).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'" + socket + "'"), HasSubstr("expected the directory that holds")));
}

TEST(Connect, ASocketThatADeadDaemonLeftIsUnavailable) {
  const TemporaryDirectory directory;
  const Endpoint endpoint{directory.path()};
  { const FakeAttachServer gone(endpoint, Welcome); }
  EXPECT_EQ(Connection::Open(directory.path()).status().code(), absl::StatusCode::kUnavailable);
}

TEST(Connect, NotPermittedSaysWhoAskedForWhat) {
  const Endpoint endpoint{"/run/dmuon"};
  const auto status = ConnectError(endpoint, endpoint.attach_path(), EACCES);
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(status.message()), HasSubstr("as uid " + std::to_string(geteuid())));
}

TEST(DefaultEndpoint, IsTheEnvironmentsWhenThatIsSet) {
  setenv("DMUON_ENDPOINT", "/somewhere/else", 1);
  EXPECT_EQ(DefaultEndpoint(), "/somewhere/else");
  unsetenv("DMUON_ENDPOINT");
}

TEST(DefaultEndpoint, IsNothingWhereNoSocketIs) {
  unsetenv("DMUON_ENDPOINT");
  if (std::filesystem::exists("/run/dmuon/attach.sock")) GTEST_SKIP() << "a daemon runs here";
  EXPECT_EQ(DefaultEndpoint(), std::nullopt);
}

}  // namespace
}  // namespace dmuon::client
