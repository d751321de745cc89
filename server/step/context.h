// What the workers of one session share: made when the session is configured, gone with it.
#ifndef DMUON_SERVER_STEP_CONTEXT_H_
#define DMUON_SERVER_STEP_CONTEXT_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/ops/backend.h"
#include "proto/wire/control_page.h"
#include "server/collective/communicator.h"
#include "server/collective/exchange_queue.h"
#include "server/memory/arena.h"
#include "server/memory/memfd.h"
#include "server/parameter/parameter.h"
#include "server/placement/plan.h"
#include "server/route/route.h"
#include "server/session/types.h"
#include "server/telemetry/step_log.h"

namespace dmuon::server {

// The memory that one slot shares with its trainer.
struct SlotArenas {
  SealedMemory control;
  Arena grad;
  Arena weight;
  wire::ControlPage page;
};

struct StepContext {
  explicit StepContext(std::string session_name) : name(std::move(session_name)) {}

  // Of the membership, as records carry it. Communicators of devices have epochs of their own (exchange_queue.h).
  static constexpr uint64_t kEpoch = 1;

  // Fixed once the workers run.
  const std::string name;
  std::vector<kernels::Backend*> backends;  // by slot: that of its device
  ParameterTable table;
  Mesh mesh;
  OptimizerSpec optimizer;
  Layout layout;
  Plan plan;
  bool z3 = false;
  uint64_t table_digest = 0;
  absl::Duration step_timeout;
  std::vector<SlotArenas> arenas;     // by slot
  std::vector<ParameterState> state;  // by parameter; written by its owner's worker alone
  std::unique_ptr<Communicator> communicator;
  std::unique_ptr<ExchangeQueue> exchanges;  // null: slots read each other's memory
  std::unique_ptr<StepLog> log;

  // Whether the slots' GRAD and WEIGHT arenas are there; false until all trainers have registered theirs.
  std::atomic<bool> arenas_there{false};
  // By slot: its trainer's memory is not to be touched any more.
  std::unique_ptr<std::atomic<bool>[]> withdrawn;

  // Shared progress. `version` of a parameter: the step that its state has committed; released by its owner.
  std::unique_ptr<std::atomic<uint64_t>[]> version;
  // By boundary x slot: the last micro (wire::ConsumedMark) that this owner has read.
  std::unique_ptr<std::atomic<uint64_t>[]> consumed;
  // By slot: the last generation for which it will send no more micros: it has sent STEP or DISCARD.
  std::unique_ptr<std::atomic<uint64_t>[]> closed_generation;
  // The last step whose verdict some trainer has seen: state that is read from now on is not older.
  std::atomic<uint64_t> answered_step{0};
  // Workers that are between the first word of a STEP and the last published weight.
  std::atomic<int> steps_under_way{0};
  // Generations below it were lost with a step that was given up.
  std::atomic<uint64_t> floor_generation{1};

  int slots() const { return mesh.world_size(); }
  const Parameter& parameter(ParameterId p) const { return table.parameters[p.index()]; }
  kernels::Backend& backend(SlotId s) const { return *backends[s.index()]; }
  bool Reachable(SlotId s) const {
    return arenas_there.load(std::memory_order_acquire) &&
           !withdrawn[s.index()].load(std::memory_order_acquire);
  }
  wire::ControlPage& page(SlotId s) { return arenas[s.index()].page; }
  std::atomic<uint64_t>& consumed_by(BoundaryId b, SlotId owner) {
    return consumed[b.index() * slots() + owner.index()];
  }

  // The gradients of generations below `next` are lost on every rank, also on those that have not come yet. The first reason
  // for a generation counts.
  void GiveUp(uint64_t next, const absl::Status& why);
  absl::Status given_up() const;

  // Wakes every worker, to look again at what they wait for.
  void RingWorkers();

  // The session is over, for this reason: every trainer's page says so, every wait ends. The first reason counts.
  void Fail(const absl::Status& why);
  // The same, for what went wrong in this slot: rounds that wait for it end, too.
  void FailSlot(SlotId slot, const absl::Status& why);
  absl::Status failure() const;

 private:
  mutable absl::Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  absl::Status given_up_ ABSL_GUARDED_BY(mu_);  // why floor_generation is what it is
};

// What was enqueued is over, whatever came of it: the first answer may be that of an older failure.
void Settle(kernels::Backend& backend, kernels::Stream stream);

// Writes `text` into a shared buffer of `size` bytes, cut to fit, NUL-terminated.
void WriteText(absl::string_view text, char* to, size_t size);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_CONTEXT_H_
