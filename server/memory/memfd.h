// Sealed shared memory: a memfd that the daemon makes, maps, and hands to one trainer. Either side may die.
#ifndef DMUON_SERVER_MEMORY_MEMFD_H_
#define DMUON_SERVER_MEMORY_MEMFD_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuon::server {

// Bytes that can be taken without pushing other processes out, as the kernel estimates them (MemAvailable); the largest
// number when it does not say.
uint64_t AvailableMemory();

// Owns descriptor and mapping. Sealed against shrinking, growing and further seals, so no holder of the descriptor can
// make this side fault. The memory is reserved when it is made: a full machine is a Status here and not a SIGBUS later.
class SealedMemory {
 public:
  // `bytes` > 0; zeroed. `name` shows in /proc. RESOURCE_EXHAUSTED names the bytes.
  static absl::StatusOr<SealedMemory> Create(const std::string& name, size_t bytes);

  SealedMemory() = default;
  SealedMemory(SealedMemory&& other) noexcept;
  SealedMemory& operator=(SealedMemory&& other) noexcept;
  ~SealedMemory();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_MEMORY_MEMFD_H_
