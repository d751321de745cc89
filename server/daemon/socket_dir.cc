#include "server/daemon/socket_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

// Whoever can write in the directory can put his own sockets in the place of ours.
absl::Status CheckTrust(const std::string& path) {
  struct stat found;
  if (lstat(path.c_str(), &found) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("looking at ", path));
  if (!S_ISDIR(found.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a directory"));
  if (found.st_uid != geteuid() && found.st_uid != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": owner: expected uid ", geteuid(), " or 0, given ", found.st_uid));
  }
  if ((found.st_mode & S_IWOTH) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: mode: expected no writing for others, given %04o", path, found.st_mode & 07777));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SocketDir> SocketDir::Acquire(const std::string& path, mode_t mode) {
  const bool made = mkdir(path.c_str(), mode) == 0;
  if (!made && errno != EEXIST) return absl::ErrnoToStatus(errno, absl::StrCat("making ", path));
  SocketDir dir(path, made);
  if (made && chmod(path.c_str(), mode) != 0) {  // what the umask took
    return absl::ErrnoToStatus(errno, absl::StrCat("chmod of ", path));
  }
  RETURN_IF_ERROR(CheckTrust(path));
  RETURN_IF_ERROR(dir.Lock());
  return dir;
}

// A dead daemon's lock is free, whatever file it left. One that is alive unlinks the file before it lets go, so a lock
// on a file that is no longer in the directory is worth nothing: look again.
absl::Status SocketDir::Lock() {
  for (;;) {
    UniqueFd fd(open(lock_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("opening ", lock_path()));
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK)
        return absl::ErrnoToStatus(errno, absl::StrCat("locking ", lock_path()));
      char pid[32];
      const ssize_t length = pread(fd.get(), pid, sizeof(pid), 0);
      return absl::AlreadyExistsError(
          absl::StrCat("another dmuond is alive in ", path_, ", pid ",
                       absl::StripAsciiWhitespace(
                           absl::string_view(pid, length > 0 ? static_cast<size_t>(length) : 0))));
    }
    struct stat locked, there;
    if (fstat(fd.get(), &locked) == 0 && lstat(lock_path().c_str(), &there) == 0 &&
        locked.st_ino == there.st_ino && locked.st_dev == there.st_dev) {
      const std::string pid = absl::StrCat(getpid(), "\n");
      if (ftruncate(fd.get(), 0) != 0 || pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) {
        return absl::ErrnoToStatus(errno, absl::StrCat("writing ", lock_path()));
      }
      lock_ = std::move(fd);
      return absl::OkStatus();
    }
  }
}

SocketDir::SocketDir(SocketDir&& other) noexcept
    : path_(std::move(other.path_)),
      made_(std::exchange(other.made_, false)),
      lock_(std::move(other.lock_)) {}

// Whatever has been put there since by others is theirs: without our lock file in it, this is another daemon's folder.
SocketDir::~SocketDir() {
  if (!lock_.valid()) {
    if (made_) rmdir(path_.c_str());
    return;
  }
  struct stat locked, there;
  const bool ours = fstat(lock_.get(), &locked) == 0 && lstat(lock_path().c_str(), &there) == 0 &&
                    locked.st_ino == there.st_ino && locked.st_dev == there.st_dev;
  if (!ours) return;
  for (const std::string& socket : {attach_path(), control_path()}) {
    if (lstat(socket.c_str(), &there) == 0 && S_ISSOCK(there.st_mode)) unlink(socket.c_str());
  }
  unlink(lock_path().c_str());
  if (made_) rmdir(path_.c_str());  // stays when something else is in it
}

}  // namespace dmuon::server
