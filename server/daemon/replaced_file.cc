#include "server/daemon/replaced_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

namespace fs = std::filesystem;

absl::string_view KindOf(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "something else";
}

// A name can be taken from anything but a directory: a device would be gone.
absl::Status CheckReplaceable(const std::string& path) {
  struct stat found;
  if (stat(path.c_str(), &found) != 0) {
    return errno == ENOENT ? absl::OkStatus() : absl::ErrnoToStatus(errno, "looking at it");
  }
  if (S_ISREG(found.st_mode)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("expected a regular file or nothing, given ", KindOf(found.st_mode)));
}

// What a link points at need not be there, so this is not realpath.
absl::StatusOr<std::string> Resolve(fs::path path) {
  constexpr int kMostLinks = 40;  // as the kernel has it
  for (int i = 0; i < kMostLinks; ++i) {
    std::error_code error;
    const fs::path target = fs::read_symlink(path, error);
    if (error) return path.string();
    path = path.parent_path() / target;  // of an absolute target, that alone
  }
  return absl::ErrnoToStatus(ELOOP, "resolving it");
}

// The empty file of that name, locked. What lies there and is not this user's own, or has a second name, is left alone.
absl::StatusOr<UniqueFd> OpenLocked(const std::string& name) {
  for (;;) {
    UniqueFd file(open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("making ", name));
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return absl::ErrnoToStatus(errno, absl::StrCat("locking ", name));
      return absl::FailedPreconditionError(
          absl::StrCat("another process is writing it, as ", name));
    }
    struct stat opened, found;
    if (fstat(file.get(), &opened) != 0) return absl::ErrnoToStatus(errno, "looking at it");
    // The one before may have renamed or removed it between the two calls.
    if (lstat(name.c_str(), &found) != 0 || found.st_ino != opened.st_ino) continue;
    if (!S_ISREG(opened.st_mode) || opened.st_nlink != 1 || opened.st_uid != geteuid()) {
      return absl::FailedPreconditionError(
          absl::StrCat("expected nothing, or what this user has left, at ", name));
    }
    if (ftruncate(file.get(), 0) != 0) return absl::ErrnoToStatus(errno, "emptying it");
    return file;
  }
}

absl::Status WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::ErrnoToStatus(errno, "writing it");
    text.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReplacedFile> ReplacedFile::Open(const std::string& path, size_t bytes) {
  RETURN_IF_ERROR(Annotate(CheckReplaceable(path), path));
  absl::StatusOr<std::string> resolved = Resolve(path);
  if (!resolved.ok()) return Annotate(resolved.status(), path);
  ReplacedFile file(*std::move(resolved));
  RETURN_IF_ERROR(Annotate(file.MakeDirectory(), path));
  RETURN_IF_ERROR(Annotate(file.MakeTemporary(bytes), path));
  return file;
}

absl::Status ReplacedFile::MakeDirectory() {
  const std::string directory = fs::path(path_).parent_path().string();
  if (directory.empty()) return absl::OkStatus();
  if (mkdir(directory.c_str(), 0755) == 0) {
    made_directory_ = directory;
  } else if (errno != EEXIST) {
    return absl::ErrnoToStatus(errno, absl::StrCat("making ", directory));
  }
  return absl::OkStatus();
}

// One name, so that what a killed process has left is used again and not added to. Whoever has it locked is alive.
absl::Status ReplacedFile::MakeTemporary(size_t bytes) {
  const std::string name = path_ + ".new";
  ASSIGN_OR_RETURN(file_, OpenLocked(name));
  temporary_ = name;
  const int error = posix_fallocate(file_.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) return absl::ErrnoToStatus(error, absl::StrCat("taking ", bytes, " bytes"));
  return absl::OkStatus();
}

absl::Status ReplacedFile::Replace(absl::string_view text) {
  return Annotate(TakeName(text), path_);
}

absl::Status ReplacedFile::TakeName(absl::string_view text) {
  RETURN_IF_ERROR(WriteAll(file_.get(), text));
  if (ftruncate(file_.get(), static_cast<off_t>(text.size())) != 0)
    return absl::ErrnoToStatus(errno, "cutting it to its length");
  // A daemon of another user may read this.
  if (fchmod(file_.get(), 0644) != 0) return absl::ErrnoToStatus(errno, "chmod");
  if (fsync(file_.get()) != 0) return absl::ErrnoToStatus(errno, "fsync");
  RETURN_IF_ERROR(CheckReplaceable(path_));  // time has passed since Open
  if (rename(temporary_.c_str(), path_.c_str()) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("renaming ", temporary_));
  temporary_.clear();
  made_directory_.clear();
  return absl::OkStatus();
}

ReplacedFile::ReplacedFile(ReplacedFile&& other) noexcept
    : path_(std::move(other.path_)),
      made_directory_(std::exchange(other.made_directory_, "")),
      temporary_(std::exchange(other.temporary_, "")),
      file_(std::move(other.file_)) {}

ReplacedFile::~ReplacedFile() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
  if (!made_directory_.empty()) rmdir(made_directory_.c_str());  // stays when another has used it
}

}  // namespace dmuon::server
