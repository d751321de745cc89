#include "client/endpoint.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/dmuon/client.h"

namespace dmuon::client {

absl::StatusOr<Endpoint> ParseEndpoint(const std::string& text) {
  absl::string_view directory = text;
  const bool unix_prefix = absl::ConsumePrefix(&directory, "unix:");
  if (directory.empty()) {
    return absl::InvalidArgumentError(
        "endpoint: expected a directory of sockets such as /run/dmuon, got an empty string");
  }
  if (!unix_prefix && !absl::StrContains(directory, '/') && absl::StrContains(directory, ':')) {
    return absl::UnimplementedError(absl::StrFormat(
        "endpoint '%s': host:port is not built yet, expected a directory of sockets such as "
        "/run/dmuon",
        text));
  }
  // Absolute, since the channel is made lazily and a trainer may change its directory before that.
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(std::string(directory), error);
  Endpoint endpoint{error ? std::string(directory) : path.lexically_normal().string()};
  while (endpoint.directory.size() > 1 && endpoint.directory.back() == '/') {
    endpoint.directory.pop_back();
  }
  if (endpoint.control_path().size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("endpoint '%s': expected a socket path under %d bytes, got %d", text,
                        sizeof(sockaddr_un::sun_path), endpoint.control_path().size()));
  }
  return endpoint;
}

absl::Status ConnectError(const Endpoint& endpoint, const std::string& path, int error) {
  if (error == EACCES || error == EPERM) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "not permitted to connect to %s as uid %d (%s): ask the operator for access to the "
        "directory %s, or name another daemon with DMUON_ENDPOINT",
        path, geteuid(), strerror(error), endpoint.directory));
  }
  if (error == ENOTDIR) {
    return absl::InvalidArgumentError(
        absl::StrFormat("endpoint '%s': expected the directory that holds the sockets, such as "
                        "/run/dmuon, got something that is not a directory",
                        endpoint.directory));
  }
  return absl::UnavailableError(absl::StrFormat(
      "no daemon answers at %s (%s): start one with `dmuond --socket-dir %s` or `systemctl start "
      "dmuond`, or set DMUON_ENDPOINT to the socket directory of a running one",
      path, strerror(error), endpoint.directory));
}

absl::Status NoAnswerError(const Endpoint& endpoint, absl::Duration timeout) {
  return absl::DeadlineExceededError(absl::StrFormat("the daemon at %s did not answer within %s",
                                                     endpoint.directory,
                                                     absl::FormatDuration(timeout)));
}

absl::StatusOr<UniqueFd> ConnectUnix(const Endpoint& endpoint, const std::string& path, int type,
                                     absl::Duration timeout) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!fd.valid()) {
    return absl::InternalError(absl::StrFormat("socket: %s", strerror(errno)));
  }
  // Also bounds connect() on a unix socket whose backlog is full.
  const timeval limit = absl::ToTimeval(timeout);
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  memcpy(address.sun_path, path.data(), path.size());
  int result;
  do {
    result = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno == EAGAIN) return NoAnswerError(endpoint, timeout);
  if (result != 0) return ConnectError(endpoint, path, errno);
  return fd;
}

std::optional<std::string> DefaultEndpoint() {
  if (const char* named = getenv("DMUON_ENDPOINT"); named != nullptr && *named != '\0') {
    return std::string(named);
  }
  struct stat info;
  const std::string socket = Endpoint{kDefaultDirectory}.attach_path();
  // A directory that may not be read holds a daemon that is not for us: an error to show, not an
  // absence.
  if (stat(socket.c_str(), &info) == 0 || errno == EACCES) return std::string(kDefaultDirectory);
  return std::nullopt;
}

}  // namespace dmuon::client
