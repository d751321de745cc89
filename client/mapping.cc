#include "client/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace dmuon::client {

absl::StatusOr<Mapping> Mapping::Map(UniqueFd fd, uint64_t bytes, absl::string_view name) {
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(fd.get(), F_GET_SEALS);  // fails on anything but a memfd
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s arena: expected sealed memory (seals %#x), got %s", name, kNeeded,
        seals < 0 ? std::string("a descriptor that is no memfd") : absl::StrFormat("%#x", seals)));
  }
  struct stat info;
  if (fstat(fd.get(), &info) != 0) {
    return absl::InternalError(absl::StrFormat("%s arena: fstat: %s", name, strerror(errno)));
  }
  if (static_cast<uint64_t>(info.st_size) != bytes) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s arena: expected %d bytes, got %d", name, bytes, info.st_size));
  }
  Mapping mapping;
  if (bytes == 0) return mapping;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s arena: mapping %d bytes: %s", name, bytes, strerror(errno)));
  }
  mapping.base_ = static_cast<std::byte*>(base);
  mapping.bytes_ = bytes;
  return mapping;
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

}  // namespace dmuon::client
