#include "server/attach/pidfd.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Debian 12's headers are older than the option
#endif

namespace dmuon::server {
namespace {

absl::Status Unseen() {
  return absl::FailedPreconditionError(
      "the process that connected cannot be seen from the daemon's pid namespace: run the daemon's "
      "container with the "
      "host's pid namespace (hostPID)");
}

absl::Status Dead() {
  return absl::FailedPreconditionError("the process that connected has ended");
}

// Field 22 of /proc/<pid>/stat: when the process started, in ticks since boot.
absl::StatusOr<uint64_t> StartTicks(pid_t pid) {
  UniqueFd file(open(absl::StrCat("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t length = file.valid() ? read(file.get(), text, sizeof(text)) : -1;
  if (length <= 0) return Dead();
  const absl::string_view line(text, static_cast<size_t>(length));
  const size_t name_end = line.rfind(')');  // the name may hold anything
  if (name_end == absl::string_view::npos)
    return absl::InternalError("unreadable /proc/<pid>/stat");
  const std::vector<absl::string_view> fields =
      absl::StrSplit(line.substr(name_end + 1), ' ', absl::SkipEmpty());
  uint64_t ticks;
  if (fields.size() < 20 || !absl::SimpleAtoi(fields[19], &ticks)) {
    return absl::InternalError("unreadable /proc/<pid>/stat");
  }
  return ticks;
}

}  // namespace

uint64_t TicksSinceBoot() {
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  const auto hertz = static_cast<uint64_t>(sysconf(_SC_CLK_TCK));
  return static_cast<uint64_t>(now.tv_sec) * hertz +
         static_cast<uint64_t>(now.tv_nsec) * hertz / 1'000'000'000u;
}

absl::StatusOr<UniqueFd> PidfdByPid(const PeerCredentials& peer, uint64_t connected_ticks) {
  if (peer.pid <= 0) return Unseen();
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  if (!pidfd.valid()) return errno == ESRCH ? Dead() : absl::ErrnoToStatus(errno, "pidfd_open");
  // From here on the pid cannot change its process without the pidfd becoming readable, so what is read now is
  // about the process that the pidfd holds, or about a dead one, which is noticed at once.
  absl::StatusOr<uint64_t> started = StartTicks(peer.pid);
  if (!started.ok()) return started.status();
  struct stat owner;
  if (stat(absl::StrCat("/proc/", peer.pid).c_str(), &owner) != 0) return Dead();
  // The owner of /proc/<pid> is root for a process that is not dumpable.
  if (*started > connected_ticks || (owner.st_uid != peer.uid && owner.st_uid != 0)) return Dead();
  return pidfd;
}

absl::StatusOr<UniqueFd> PeerPidfd(int socket, const PeerCredentials& peer) {
  // Newer kernels have a pidfd for it, too, by which nobody could be named.
  if (peer.pid <= 0) return Unseen();
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) return UniqueFd(fd);
  if (errno == ENOPROTOOPT) return PidfdByPid(peer, TicksSinceBoot());
  if (errno == ESRCH || errno == EINVAL || errno == ENODATA) return Dead();
  return absl::ErrnoToStatus(errno, "SO_PEERPIDFD");
}

}  // namespace dmuon::server
