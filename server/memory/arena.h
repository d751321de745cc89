// One GRAD or WEIGHT arena as a step sees it: sealed memory that this daemon made, or memory of the trainer's device that is
// mapped here.
#ifndef DMUON_SERVER_MEMORY_ARENA_H_
#define DMUON_SERVER_MEMORY_ARENA_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "kernels/ops/backend.h"
#include "server/memory/memfd.h"

namespace dmuon::server {

// Owns it; moves, never copies. Empty until its trainer has registered it, where trainers allocate.
class Arena {
 public:
  Arena() = default;
  explicit Arena(SealedMemory memory) : sealed_(std::move(memory)) {}
  explicit Arena(std::unique_ptr<kernels::ImportedMemory> memory) : imported_(std::move(memory)) {}

  std::byte* data() const { return imported_ ? imported_->data() : sealed_.data(); }
  size_t size() const { return imported_ ? imported_->size() : sealed_.size(); }
  // To hand out over the attach socket; null unless the daemon made it.
  const SealedMemory* sealed() const { return sealed_.data() == nullptr ? nullptr : &sealed_; }
  // Gives the mapping away, to be closed elsewhere; null unless it is one.
  std::unique_ptr<kernels::ImportedMemory> Release() { return std::move(imported_); }

 private:
  SealedMemory sealed_;
  std::unique_ptr<kernels::ImportedMemory> imported_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_MEMORY_ARENA_H_
