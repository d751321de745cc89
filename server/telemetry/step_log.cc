#include "server/telemetry/step_log.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace dmuon::server {

StepLog::StepLog(const std::vector<size_t>& blocks, size_t remembered)
    : slots_(static_cast<int>(blocks.size())), ring_(remembered) {
  for (size_t count : blocks) {
    first_block_.push_back(all_blocks_);
    all_blocks_ += count;
  }
  const size_t bytes = std::max<size_t>(all_blocks_, 1) * sizeof(BlockMeasures);
  block_steps_ = std::clamp<size_t>(kBlockBytes / bytes, 1, remembered);
  blocks_.resize(block_steps_ * all_blocks_);
}

void StepLog::Add(const SlotStep& part, SlotId slot, absl::Span<const BlockMeasures> blocks) {
  absl::MutexLock lock(&mu_);
  LoggedStep* newest = count_ == 0 ? nullptr : &ring_[(count_ - 1) % ring_.size()];
  const bool same_attempt = newest != nullptr && newest->merged.step == part.step &&
                            newest->slots < slots_ &&
                            newest->merged.status.code() == part.status.code();
  if (!same_attempt) {
    newest = &ring_[count_ % ring_.size()];
    ++count_;
    *newest = {part, absl::Now(), 1};
    std::ranges::fill(BlocksAt(count_ - 1), BlockMeasures{});
    std::ranges::copy(blocks, BlocksAt(count_ - 1).begin() + first_block_[slot.index()]);
    return;
  }
  std::ranges::copy(blocks, BlocksAt(count_ - 1).begin() + first_block_[slot.index()]);
  SlotStep& merged = newest->merged;
  merged.wait = std::max(merged.wait, part.wait);
  merged.reduce = std::max(merged.reduce, part.reduce);
  merged.verdict = std::max(merged.verdict, part.verdict);
  merged.update = std::max(merged.update, part.update);
  merged.publish = std::max(merged.publish, part.publish);
  merged.total = std::max(merged.total, part.total);
  merged.newton_schulz_calls += part.newton_schulz_calls;
  ++newest->slots;
}

std::vector<LoggedStep> StepLog::CompleteAfter(uint64_t after) const {
  std::vector<LoggedStep> out;
  const uint64_t first = count_ > ring_.size() ? count_ - ring_.size() : 0;
  for (uint64_t i = first; i < count_; ++i) {
    const LoggedStep& s = ring_[i % ring_.size()];
    if (s.merged.step > after && Complete(s)) out.push_back(s);
  }
  return out;
}

std::vector<LoggedStep> StepLog::After(uint64_t after, absl::Duration timeout) const {
  absl::MutexLock lock(&mu_);
  const auto there = [this, after]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (closed_) return true;
    const uint64_t first = count_ > ring_.size() ? count_ - ring_.size() : 0;
    for (uint64_t i = first; i < count_; ++i) {
      const LoggedStep& s = ring_[i % ring_.size()];
      if (s.merged.step > after && Complete(s)) return true;
    }
    return false;
  };
  mu_.AwaitWithTimeout(absl::Condition(&there), timeout);
  return CompleteAfter(after);
}

bool StepLog::Find(uint64_t step, LoggedStep* out, std::vector<BlockMeasures>* blocks) const {
  absl::MutexLock lock(&mu_);
  const uint64_t first = count_ > ring_.size() ? count_ - ring_.size() : 0;
  for (uint64_t i = count_; i > first; --i) {
    const LoggedStep& s = ring_[(i - 1) % ring_.size()];
    if ((step == 0 || s.merged.step == step) && Complete(s)) {
      *out = s;
      if (blocks == nullptr) return true;
      const auto at =
          blocks_.begin() + static_cast<ptrdiff_t>((i - 1) % block_steps_ * all_blocks_);
      const bool remembered = count_ - (i - 1) <= block_steps_;
      blocks->assign(at, remembered ? at + static_cast<ptrdiff_t>(all_blocks_) : at);
      return true;
    }
  }
  return false;
}

void StepLog::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
}

bool StepLog::closed() const {
  absl::MutexLock lock(&mu_);
  return closed_;
}

}  // namespace dmuon::server
