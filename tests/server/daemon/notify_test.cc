#include "server/daemon/notify.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace dmuon::server {
namespace {

// A socket where systemd would listen; an abstract name begins with '@'.
std::string Heard(const std::string& name, absl::string_view said) {
  const UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, name.data(), name.size());
  if (name[0] == '@') address.sun_path[0] = 0;
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  setenv("NOTIFY_SOCKET", name.c_str(), 1);
  NotifySystemd(said);
  unsetenv("NOTIFY_SOCKET");
  char text[256];
  const ssize_t length = recv(fd.get(), text, sizeof(text), MSG_DONTWAIT);
  unlink(name.c_str());
  return std::string(text, length > 0 ? static_cast<size_t>(length) : 0);
}

TEST(Notify, SystemdHearsWhatIsSaid) {
  EXPECT_EQ(Heard(absl::StrCat("/tmp/dmuon-notify-", getpid()), "READY=1\nSTATUS=serving"),
            "READY=1\nSTATUS=serving");
  EXPECT_EQ(Heard(absl::StrCat("@dmuon-notify-", getpid()), "STOPPING=1"), "STOPPING=1");
}

TEST(Notify, NobodyAsksAndNothingHappens) {
  unsetenv("NOTIFY_SOCKET");
  NotifySystemd("READY=1");
}

}  // namespace
}  // namespace dmuon::server
