// The communicator of slots that live in one daemon: shared memory and one mutex.
#ifndef DMUON_SERVER_COLLECTIVE_LOCAL_COMMUNICATOR_H_
#define DMUON_SERVER_COLLECTIVE_LOCAL_COMMUNICATOR_H_

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/communicator.h"

namespace dmuon::server {

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(int slots, int boundaries, size_t max_message_bytes);

  int size() const override { return slots_; }
  void Announce(SlotId slot, BoundaryId boundary, uint64_t mark) override;
  uint64_t Announced(SlotId slot, BoundaryId boundary) const override;
  void Post(SlotId slot, absl::Span<const std::byte> message) override;
  RoundState State(SlotId slot) const override;
  absl::Span<const std::byte> Message(SlotId slot, SlotId from) const override;
  std::vector<SlotId> Missing(SlotId slot) const override;
  void Abort(SlotId slot, const absl::Status& cause) override;
  absl::Status Cause(SlotId slot) const override;
  void SetGone(SlotId slot, const absl::Status& why) override;
  absl::Status Gone(SlotId slot) const override;

 private:
  // A slot lags at most one complete round behind; aborted rounds are remembered a little longer for slow readers.
  static constexpr size_t kRemembered = 16;
  struct Outcome {
    uint64_t round = 0;
    RoundState state = RoundState::kOpen;
    absl::Status cause;
  };
  Outcome& OutcomeOf(uint64_t round) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return outcomes_[round % kRemembered];
  }
  void EndRound(RoundState state, const absl::Status& cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int slots_;
  const int boundaries_;
  const std::unique_ptr<std::atomic<uint64_t>[]> announced_;  // [slot][boundary]

  mutable absl::Mutex mu_;
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 1;
  int posted_count_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<uint64_t> posted_ ABSL_GUARDED_BY(mu_);  // by slot: the round that it posted last
  std::vector<absl::Status> gone_ ABSL_GUARDED_BY(mu_);
  // [parity of the round][slot]: a slot can post round r + 2 only when all have read round r.
  std::array<std::vector<std::vector<std::byte>>, 2> messages_;
  std::array<Outcome, kRemembered> outcomes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_LOCAL_COMMUNICATOR_H_
