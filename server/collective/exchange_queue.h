// The exchanges of a session whose slots cannot read each other's memory, in the one order in which all slots take part in
// them. Whoever first sees that something can move appends it; every slot works off the same entries, each at its own pace.
//
// The exchanges run on the communicator of the current epoch. When that is aborted, every slot lets go of it (Leave), and
// the last one makes the next epoch. That begins at the first entry that some slot has not finished. Weights move once more;
// gradients that any slot had submitted do not, since their trainers may write again, and their step fails.
//
// Thread-safe.
#ifndef DMUON_SERVER_COLLECTIVE_EXCHANGE_QUEUE_H_
#define DMUON_SERVER_COLLECTIVE_EXCHANGE_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/collective/device_communicator.h"
#include "server/parameter/parameter.h"
#include "server/placement/plan.h"

namespace dmuon::server {

struct QueuedExchange {
  enum class Kind {
    kGradient,  // of all slots, to the owner
    kWeight,    // of the owner, to all slots
    kWindow,    // of the owner, to one slot
  };
  Kind kind = Kind::kGradient;
  ParameterId parameter;
  uint64_t generation = 0;  // of kGradient, and so are the next two
  uint32_t micro = 0;
  bool last = false;  // of its boundary and micro
  SlotId to;          // of kWindow
};

class ExchangeQueue {
 public:
  struct Epoch {
    uint64_t number = 0;
    DeviceCommunicator* communicator = nullptr;
    uint64_t first = 0;        // entries from here on move in it
    uint64_t void_before = 0;  // gradients before it were lost with the epoch before
    absl::Status lost;         // and why
  };

  // `options`: of the first epoch, without its id. `plan` must outlive the queue.
  ExchangeQueue(const Plan& plan, DeviceCommunicators& library, DeviceCommunicatorOptions options);

  // Makes the first epoch and waits until it is formed. Once, before any other call.
  absl::Status Form();

  // Appends what is missing of `micros()` micros of the boundary, in rank order of their arrival. False: not all of them,
  // for lack of room; ask again. `changed` is set when anything was appended.
  bool AppendGradients(BoundaryId boundary, uint64_t generation,
                       absl::FunctionRef<uint32_t()> micros, bool& changed);
  // The position behind it. There is room while no parameter has two of them under way, and one more outside of steps.
  uint64_t AppendWeight(ParameterId parameter);
  // All of them or, for lack of room, none.
  std::optional<uint64_t> AppendWindow(absl::Span<const ParameterId> parameters, SlotId to);

  // Entries are at the positions below it.
  uint64_t end() const { return end_.load(std::memory_order_acquire); }
  // REQUIRES: `position` < end(), and some slot has not finished it.
  const QueuedExchange& At(uint64_t position) const { return entries_[position % entries_.size()]; }
  // `slot` has done its part of everything before `position`, on its device, too.
  void Finish(SlotId slot, uint64_t position);
  uint64_t finished_by_all() const { return finished_by_all_.load(std::memory_order_acquire); }
  // Until all slots have finished everything before `position`, or `ended` says why they will not.
  absl::Status AwaitFinished(uint64_t position, absl::FunctionRef<absl::Status()> ended) const;

  uint64_t epoch() const { return number_.load(std::memory_order_acquire); }
  Epoch current() const;
  // A slot that had submitted everything before `submitted` uses the aborted epoch no more, and enters the next one when epoch()
  // has changed. Once an epoch. An error: there is no next one.
  absl::Status Leave(uint64_t submitted);

 private:
  uint64_t Free() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Append(const QueuedExchange& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Renew();
  absl::StatusOr<std::unique_ptr<DeviceCommunicator>> MakeCommunicator(uint64_t epoch);

  const Plan& plan_;
  DeviceCommunicators& library_;
  const DeviceCommunicatorOptions options_;
  const int slots_;
  const uint64_t reserve_;  // entries that gradients and windows leave to weights

  std::unique_ptr<DeviceCommunicator> communicator_;  // replaced while no slot is in an epoch
  std::atomic<uint64_t> number_{0};
  std::atomic<uint64_t> end_{0};
  std::atomic<uint64_t> finished_by_all_{0};
  std::vector<QueuedExchange> entries_;  // ring; an entry is written before end_ passes it
  std::unique_ptr<std::atomic<uint64_t>[]> appended_;  // by boundary: generation and micros

  mutable absl::Mutex mu_;
  Epoch epoch_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> passed_ ABSL_GUARDED_BY(mu_);    // by slot: finished in this epoch
  std::vector<uint64_t> finished_ ABSL_GUARDED_BY(mu_);  // by slot: finished in any
  int left_ ABSL_GUARDED_BY(mu_) = 0;                    // slots that left the epoch
  uint64_t submitted_ ABSL_GUARDED_BY(mu_) = 0;          // the furthest of those
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_EXCHANGE_QUEUE_H_
