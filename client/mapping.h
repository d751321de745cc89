// A sealed memfd of the daemon, mapped into this process.
#ifndef DMUON_CLIENT_MAPPING_H_
#define DMUON_CLIENT_MAPPING_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"

namespace dmuon::client {

// Owner of one shared mapping: moves, never copies, unmaps once. The descriptor is not kept.
class Mapping {
 public:
  // Maps `bytes` of `fd` for reading and writing. FAILED_PRECONDITION when the descriptor could be
  // shrunk under us (then a later access would be SIGBUS) or its size is not `bytes`. `name` is for
  // the message.
  static absl::StatusOr<Mapping> Map(UniqueFd fd, uint64_t bytes, absl::string_view name);

  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;  // nullptr also for an arena of no bytes
  size_t bytes_ = 0;
};

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_MAPPING_H_
