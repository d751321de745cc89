#include "server/memory/memfd.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <limits>

#include "absl/strings/str_format.h"

namespace dmuon::server {

uint64_t AvailableMemory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  uint64_t kib = 0;
  while (meminfo >> key >> kib) {
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return std::numeric_limits<uint64_t>::max();
}

absl::StatusOr<SealedMemory> SealedMemory::Create(const std::string& name, size_t bytes) {
  const auto failed = [&](const char* call) {
    const std::string text = absl::StrFormat("shared memory '%s' of %d bytes: %s: %s", name, bytes,
                                             call, strerror(errno));
    if (errno == ENOSPC || errno == ENOMEM || errno == EMFILE || errno == ENFILE) {
      return absl::ResourceExhaustedError(text);
    }
    return absl::InternalError(text);
  };
  // Shared memory has no limit of its own: reserving more than there is would end other processes first.
  if (const uint64_t available = AvailableMemory(); bytes > available) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "shared memory '%s': needs %d bytes, %d are available", name, bytes, available));
  }
  SealedMemory memory;
  memory.fd_ = UniqueFd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_.valid()) return failed("memfd_create");
  if (fallocate(memory.fd(), 0, 0, static_cast<off_t>(bytes)) != 0) return failed("fallocate");
  if (fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return failed("F_ADD_SEALS");
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd(), 0);
  if (data == MAP_FAILED) return failed("mmap");
  memory.data_ = static_cast<std::byte*>(data);
  memory.size_ = bytes;
  return memory;
}

SealedMemory::SealedMemory(SealedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SealedMemory& SealedMemory::operator=(SealedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SealedMemory::~SealedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace dmuon::server
