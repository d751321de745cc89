#include "server/collective/local_communicator.h"

#include <algorithm>

namespace dmuon::server {

LocalCommunicator::LocalCommunicator(int slots, int boundaries, size_t max_message_bytes)
    : slots_(slots),
      boundaries_(boundaries),
      announced_(new std::atomic<uint64_t>[static_cast<size_t>(slots) * boundaries]()),
      posted_(slots, 0),
      gone_(slots) {
  for (auto& side : messages_) {
    side.resize(slots);
    for (auto& message : side) message.reserve(max_message_bytes);
  }
}

void LocalCommunicator::Announce(SlotId slot, BoundaryId boundary, uint64_t mark) {
  announced_[slot.index() * boundaries_ + boundary.index()].store(mark, std::memory_order_release);
}

uint64_t LocalCommunicator::Announced(SlotId slot, BoundaryId boundary) const {
  return announced_[slot.index() * boundaries_ + boundary.index()].load(std::memory_order_acquire);
}

void LocalCommunicator::Post(SlotId slot, absl::Span<const std::byte> message) {
  absl::MutexLock lock(&mu_);
  // Within the reserved capacity: nothing is allocated.
  messages_[round_ % 2][slot.index()].assign(message.begin(), message.end());
  posted_[slot.index()] = round_;
  if (++posted_count_ == slots_) EndRound(RoundState::kComplete, absl::OkStatus());
}

void LocalCommunicator::EndRound(RoundState state, const absl::Status& cause) {
  OutcomeOf(round_) = {round_, state, cause};
  ++round_;
  posted_count_ = 0;
}

RoundState LocalCommunicator::State(SlotId slot) const {
  absl::MutexLock lock(&mu_);
  const uint64_t round = posted_[slot.index()];
  if (round == round_) return RoundState::kOpen;
  const Outcome& outcome = outcomes_[round % kRemembered];
  return outcome.round == round ? outcome.state : RoundState::kAborted;
}

absl::Span<const std::byte> LocalCommunicator::Message(SlotId slot, SlotId from) const {
  absl::MutexLock lock(&mu_);
  return messages_[posted_[slot.index()] % 2][from.index()];
}

std::vector<SlotId> LocalCommunicator::Missing(SlotId slot) const {
  absl::MutexLock lock(&mu_);
  std::vector<SlotId> missing;
  if (posted_[slot.index()] != round_) return missing;
  for (int s = 0; s < slots_; ++s) {
    if (posted_[s] != round_) missing.push_back(SlotId(s));
  }
  return missing;
}

void LocalCommunicator::Abort(SlotId slot, const absl::Status& cause) {
  absl::MutexLock lock(&mu_);
  if (posted_[slot.index()] == round_) EndRound(RoundState::kAborted, cause);
}

absl::Status LocalCommunicator::Cause(SlotId slot) const {
  absl::MutexLock lock(&mu_);
  const uint64_t round = posted_[slot.index()];
  const Outcome& outcome = outcomes_[round % kRemembered];
  if (outcome.round == round) return outcome.cause;
  return absl::AbortedError("the round was aborted and its cause is no longer remembered");
}

void LocalCommunicator::SetGone(SlotId slot, const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  if (gone_[slot.index()].ok()) gone_[slot.index()] = why;
}

absl::Status LocalCommunicator::Gone(SlotId slot) const {
  absl::MutexLock lock(&mu_);
  return gone_[slot.index()];
}

}  // namespace dmuon::server
