// One training job as this daemon sees it, from its first rank to its last: FORMING -> OPEN -> READY <-> STEPPING.
//
// Thread-safe. Collective calls block their thread. After a failure the session stays until its ranks have left, so that
// each of them can be told why, but its name is free. Errors are those of session_table.h.
#ifndef DMUON_SERVER_SESSION_SESSION_H_
#define DMUON_SERVER_SESSION_SESSION_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/ops/backend.h"
#include "server/memory/reaper.h"
#include "server/session/registration.h"
#include "server/session/types.h"
#include "server/step/context.h"
#include "server/step/worker.h"

namespace dmuon::server {

class Session {
 public:
  struct Limits {
    absl::Duration formation_timeout;
    absl::Duration step_timeout;
    absl::Duration exchange_timeout;
    uint64_t max_bytes = 0;  // SlotMemory::total of all slots
  };

  // `first` is the spec of the first rank that came: checked, and what the others are compared with. `costs`: as measured
  // on this machine, or null.
  Session(SessionId id, uid_t uid, const OpenSpec& first, kernels::Backend& backend, Reaper& reaper,
          Limits limits, std::shared_ptr<const kernels::CostTable> costs);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  SessionId id() const { return id_; }
  const std::string& name() const { return context_.name; }
  uid_t uid() const { return uid_; }

  absl::StatusOr<Opened> Open(const Trainer& trainer, const OpenSpec& spec);
  absl::StatusOr<Configured> Configure(const Trainer& trainer, int rank, OptimizerSpec spec);
  absl::StatusOr<ArenaHandle> Arena(const Trainer& trainer, int rank, wire::ArenaKind kind);
  absl::StatusOr<Registered> Register(const Trainer& trainer, int rank,
                                      const Registration& registration);
  absl::StatusOr<uint64_t> Confirm(const Trainer& trainer, int rank,
                                   const std::vector<std::string>& found);
  absl::StatusOr<StepReport> StepResult(uint64_t step, bool with_blocks) const;
  absl::StatusOr<uint64_t> StateBytes(const std::string& parameter, StateKind kind) const;
  absl::StatusOr<std::vector<std::byte>> ReadState(const std::string& parameter, StateKind kind);
  absl::Status WriteState(const std::string& parameter, StateKind kind,
                          absl::Span<const std::byte> data);
  absl::Status Close(const Trainer& trainer, int rank);
  // Closes the device memory of ranks that are gone, once no worker uses it. Waits for a step under way and for the
  // driver; DEADLINE_EXCEEDED when that does not come back.
  absl::Status ReleaseGone();
  bool by_handle() const { return by_handle_; }

  // A process is gone. True when it was one of this session's ranks.
  bool TrainerGone(AttachmentId attachment);
  // Ends the session: every wait, in the daemon and in the trainers.
  void Fail(const absl::Status& why);
  absl::Status failure() const;

  // No rank is left: the session can go.
  bool Abandoned() const;
  bool StepUnderWay() const { return context_.steps_under_way.load() > 0; }
  bool Holds(AttachmentId attachment) const;
  SessionDescription Describe() const;
  std::vector<StepReport> Steps(uint64_t after, absl::Duration timeout) const;

 private:
  // One collective call. Every rank comes once; the last one runs what is to be done; all get the same status.
  struct Gathering {
    explicit Gathering(int world_size) : here(world_size, false) {}
    std::vector<bool> here;
    int came = 0;
    bool done = false;
    absl::Status status;
  };
  struct Rank {
    Trainer trainer;
    bool came = false;   // has opened the session
    bool alive = false;  // attached, and not closed
    kernels::Backend* backend = nullptr;
    bool importing = false;                  // its arenas are being mapped
    std::optional<ImportedArenas> imported;  // until the session is READY
    std::vector<Reaper::Ticket> closing;     // of its arenas
  };

  absl::Status Gather(Gathering& gathering, int rank, absl::Time deadline, absl::string_view what,
                      absl::FunctionRef<absl::Status()> complete)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckRank(const Trainer& trainer, int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status FailLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckSame(const OpenSpec& spec) const;
  absl::Status CheckOptimizer(const OptimizerSpec& spec) const;
  absl::Status BuildSlots();
  absl::Status ConnectDevices();
  absl::Status PrepareExchanges(const absl::Status& why);
  absl::Status CheckMemory(const std::vector<std::unique_ptr<Worker>>& workers) const;
  absl::Status BuildArenas();
  absl::StatusOr<Registered> Import(const Trainer& trainer, int rank,
                                    const Registration& registration)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Adopt();
  absl::StatusOr<uint64_t> BecomeReady(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CloseArenas(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  StepReport ReportOf(const LoggedStep& logged) const;
  std::string FormsOf(const SlotStep& step) const;
  std::vector<BlockReport> BlocksOf(absl::Span<const BlockMeasures> measures) const;
  struct Located {
    ParameterId parameter;
    uint64_t bytes = 0;
  };
  absl::StatusOr<Located> Locate(const std::string& parameter, StateKind kind) const;
  kernels::Backend& BackendOf(ParameterId parameter) const;
  absl::Status RunAtOwner(ParameterId parameter, absl::FunctionRef<void(kernels::Stream)> work);

  const SessionId id_;
  const uid_t uid_;
  const Limits limits_;
  const bool reshard_after_forward_;
  kernels::Backend& backend_;
  Reaper& reaper_;
  const bool by_handle_;
  const absl::Duration formation_timeout_;
  const std::shared_ptr<const kernels::CostTable> costs_;
  Placement placement_;  // owners fixed in the constructor; weighed anew once the options are known

  // Fixed from the end of Configure on; before it only its completing caller touches it (and table, mesh, plan).
  StepContext context_;
  std::vector<std::unique_ptr<Worker>> workers_;  // by slot

  absl::Mutex
      publishing_;  // one publication outside of steps at a time; held while it is under way

  mutable absl::Mutex mu_;
  SessionState state_ ABSL_GUARDED_BY(mu_) = SessionState::kForming;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::vector<Rank> ranks_ ABSL_GUARDED_BY(mu_);
  std::optional<OptimizerSpec> spec_ ABSL_GUARDED_BY(mu_);  // of the first rank that configured
  int spec_rank_ ABSL_GUARDED_BY(mu_) = 0;
  Gathering opening_ ABSL_GUARDED_BY(mu_);
  Gathering configuring_ ABSL_GUARDED_BY(mu_);
  Gathering registering_ ABSL_GUARDED_BY(mu_);
  bool built_ ABSL_GUARDED_BY(mu_) = false;  // arenas and workers are there
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_SESSION_SESSION_H_
