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
class StepLog {
 public:
  StepLog(int slots, size_t remembered);

  // Parts of one attempt arrive from all slots before any part of the next one, except after a failure.
  void Add(const SlotStep& part);

  // Complete steps with id > `after`, oldest first; waits up to `timeout` until there is one, or until Close.
  std::vector<LoggedStep> After(uint64_t after, absl::Duration timeout) const;
  // The complete record of `step`, 0 = the newest. False when it is not remembered.
  bool Find(uint64_t step, LoggedStep* out) const;
  // No step will follow: ends every wait.
  void Close();
  bool closed() const;

 private:
  bool Complete(const LoggedStep& s) const { return s.slots >= slots_ || !s.merged.status.ok(); }
  std::vector<LoggedStep> CompleteAfter(uint64_t after) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int slots_;
  mutable absl::Mutex mu_;
  std::vector<LoggedStep> ring_ ABSL_GUARDED_BY(mu_);  // ring_[i % size], i in [0, count_)
  uint64_t count_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_TELEMETRY_STEP_LOG_H_
