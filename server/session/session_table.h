// All sessions of this daemon, by name and id. The one door through which RPC and attach threads reach the domain.
//
// Thread-safe. Calls that are collective over the ranks block their thread until all ranks have made them, the session
// fails, or the deadline passes; OnTrainerGone wakes them. No call waits for a step to end except ReadState and
// WriteState, which a worker serves between two steps.
//
// Errors: NOT_FOUND no such session; PERMISSION_DENIED another user's; FAILED_PRECONDITION wrong order or a rank that
// is not the caller's; ALREADY_EXISTS the rank is attached; INVALID_ARGUMENT malformed, or different from the other
// ranks (names the first difference and both ranks); DEADLINE_EXCEEDED names the ranks that did not come;
// RESOURCE_EXHAUSTED bytes needed and bytes there, or the limit's name; UNAVAILABLE draining; ABORTED a rank died.
#ifndef DMUON_SERVER_SESSION_SESSION_TABLE_H_
#define DMUON_SERVER_SESSION_SESSION_TABLE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/ops/backend.h"
#include "server/session/types.h"

namespace dmuon::server {

class Session;

struct SessionLimits {
  absl::Duration formation_timeout = absl::Seconds(300);
  absl::Duration step_timeout = absl::Seconds(600);
  absl::Duration exchange_timeout = absl::Seconds(60);
  int max_sessions = 64;
  uint64_t max_session_bytes = 0;  // 0 = 80 % of the machine's memory; on GPUs, what they have
};

class SessionTable {
 public:
  // `backend` must outlive the table. `costs`: what Newton-Schulz costs on it; null = not measured.
  SessionTable(kernels::Backend& backend, SessionLimits limits,
               std::shared_ptr<const kernels::CostTable> costs = nullptr);
  ~SessionTable();
  SessionTable(const SessionTable&) = delete;
  SessionTable& operator=(const SessionTable&) = delete;

  // Collective. Creates the session with its first rank.
  absl::StatusOr<Opened> Open(const Trainer& trainer, OpenSpec spec);
  // Collective, after Open.
  absl::StatusOr<Configured> Configure(const Trainer& trainer, SessionId id, int rank,
                                       OptimizerSpec spec);
  // After Configure. For the attach socket.
  absl::StatusOr<ArenaHandle> Arena(const Trainer& trainer, SessionId id, int rank,
                                    wire::ArenaKind kind);
  // Collective, after Configure: READY, and version `step` is published. Returns the last committed step.
  // With handles it is not collective: the arenas are mapped, and Confirm is the collective call.
  absl::StatusOr<Registered> Register(const Trainer& trainer, SessionId id, int rank,
                                      const Registration& registration);
  // Collective, with handles: what the trainer found at the probes. READY after it.
  absl::StatusOr<uint64_t> Confirm(const Trainer& trainer, SessionId id, int rank,
                                   const std::vector<std::string>& found);
  // The step's report; step 0 = the last one. NOT_FOUND when it is not remembered.
  absl::StatusOr<StepReport> StepResult(const Trainer& trainer, SessionId id, uint64_t step,
                                        bool with_blocks = false);
  // Size of one parameter's state: what ReadState returns and WriteState takes. After Open; does not wait. Lets a caller
  // check a size that a trainer claims before it allocates. INVALID_ARGUMENT: the parameter has no such state.
  absl::StatusOr<uint64_t> StateBytes(const Trainer& trainer, SessionId id,
                                      const std::string& parameter, StateKind kind) const;
  // Bytes of one parameter's state: fp32 in row-major order; kStep one int64.
  absl::StatusOr<std::vector<std::byte>> ReadState(const Trainer& trainer, SessionId id,
                                                   const std::string& parameter, StateKind kind);
  // After Configure. Weights that are written once READY are published to all ranks at the same version.
  absl::Status WriteState(const Trainer& trainer, SessionId id, const std::string& parameter,
                          StateKind kind, absl::Span<const std::byte> data);
  // The rank leaves. With the last one the session is gone, and its memory. When it returns OK, device memory of the rank
  // is not mapped here any more: it may be freed.
  absl::Status Close(const Trainer& trainer, SessionId id, int rank);

  // The process of this attachment is dead (or its attachment was refused or taken away). Idempotent.
  void OnTrainerGone(AttachmentId attachment);

  // For Admin.
  std::vector<SessionDescription> List() const;
  absl::StatusOr<SessionDescription> Describe(const std::string& name) const;
  // Remembered reports of steps > `after`, oldest first; waits up to `timeout` for the first. NOT_FOUND when closed.
  absl::StatusOr<std::vector<StepReport>> Steps(const std::string& name, uint64_t after,
                                                absl::Duration timeout) const;

  // One step's report with its blocks; step 0 = the last one.
  absl::StatusOr<StepReport> DescribeStep(const std::string& name, uint64_t step) const;

  // Refuses new sessions from now on. Steps under way are finished.
  void StartDrain();
  bool draining() const;
  // Waits until no step is under way, or `deadline`; then ends all sessions with UNAVAILABLE.
  void FinishDrain(absl::Time deadline);
  int size() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_SESSION_SESSION_TABLE_H_
