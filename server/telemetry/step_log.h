// The steps that a session remembers, newest last. Each slot adds its part; a step is readable once all slots have.
#ifndef DMUON_SERVER_TELEMETRY_STEP_LOG_H_
#define DMUON_SERVER_TELEMETRY_STEP_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/session/types.h"

namespace dmuon::server {

// One slot's share of one step. Durations in seconds.
struct SlotStep {
  uint64_t step = 0;
  bool applied = true;  // false: skipped for a non-finite gradient
  absl::Status status;  // of a failed step
  double total_norm = 0;
  double clip_coefficient = 1;
  double wait = 0, reduce = 0, verdict = 0, update = 0, publish = 0, total = 0;
  int newton_schulz_calls = 0;
};

// The slowest slot's durations, the sum of the calls.
struct LoggedStep {
  SlotStep merged;
  absl::Time at;  // when the first slot was done
  int slots = 0;  // that have added their part
};

// Thread-safe. Adding allocates nothing for a step that did not fail.
//
// Steps are remembered for long, what each block did in them only for the newest: as many as fit into kBlockBytes, and at
// least the last one.
class StepLog {
 public:
  static constexpr size_t kBlockBytes = size_t{4} << 20;

  // `blocks`: how many each slot has.
  StepLog(const std::vector<size_t>& blocks, size_t remembered);

  // Parts of one attempt arrive from all slots before any part of the next one, except after a failure. `blocks`: of the
  // slot; none for a failed step.
  void Add(const SlotStep& part, SlotId slot, absl::Span<const BlockMeasures> blocks);

  // Complete steps with id > `after`, oldest first; waits up to `timeout` until there is one, or until Close.
  std::vector<LoggedStep> After(uint64_t after, absl::Duration timeout) const;
  // The complete record of `step`, 0 = the newest. False when it is not remembered. `blocks`, if given: of all slots one
  // after the other, or none where they are not remembered.
  bool Find(uint64_t step, LoggedStep* out, std::vector<BlockMeasures>* blocks = nullptr) const;
  // No step will follow: ends every wait.
  void Close();
  bool closed() const;

 private:
  bool Complete(const LoggedStep& s) const { return s.slots >= slots_ || !s.merged.status.ok(); }
  std::vector<LoggedStep> CompleteAfter(uint64_t after) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Of the i-th attempt, for all slots.
  absl::Span<BlockMeasures> BlocksAt(uint64_t i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return absl::MakeSpan(blocks_).subspan(i % block_steps_ * all_blocks_, all_blocks_);
  }

  const int slots_;
  std::vector<size_t> first_block_;  // by slot
  size_t all_blocks_ = 0;
  size_t block_steps_ = 1;  // attempts whose blocks are remembered
  mutable absl::Mutex mu_;
  std::vector<BlockMeasures> blocks_ ABSL_GUARDED_BY(mu_);
  std::vector<LoggedStep> ring_ ABSL_GUARDED_BY(mu_);  // ring_[i % size], i in [0, count_)
  uint64_t count_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_TELEMETRY_STEP_LOG_H_
