// What a worker does while it waits, and so never stands in anybody's way: it drains its ring, reads gradients that all
// ranks have sent, fills windows, and serves reads and writes of its state.
#ifndef DMUON_SERVER_STEP_PROGRESS_H_
#define DMUON_SERVER_STEP_PROGRESS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/ops/backend.h"
#include "server/step/context.h"
#include "server/step/courier.h"
#include "server/step/record_table.h"

namespace dmuon::server {

class Progress {
 public:
  Progress(StepContext& context, SlotId slot, kernels::Stream stream,
           std::unique_ptr<Courier> courier);

  // Any thread. Runs `work` on the worker's thread between two steps, once its state has reached `step`, and returns
  // when it is done; UNAVAILABLE when the worker is stopped instead.
  absl::Status Run(uint64_t step, absl::FunctionRef<void(kernels::Stream)> work);
  // Any thread. Every wait ends soon after.
  void Stop();
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

  // The worker's own thread from here on.

  // Makes progress until `done` or `deadline`, sleeping in between. False when it ended for the deadline or a stop.
  bool Until(absl::FunctionRef<bool()> done, absl::Time deadline);
  // Drains the ring and fills windows, and touches no state: for use between the parameters of a step. Gradients of the
  // next step wait: they would take the place of those that this step still needs.
  void Drain();
  // The same until `done`, which devices make true, of this slot or of others. Nothing of this step needs its gradients any more.
  void DrainUntil(absl::FunctionRef<bool()> done);

  RecordTable& records() { return records_; }
  Courier& courier() { return *courier_; }
  // The last step that this slot's state has committed.
  uint64_t step() const { return step_; }
  void SetStep(uint64_t step) { step_ = step; }

 private:
  struct Task {
    uint64_t step = 0;
    absl::FunctionRef<void(kernels::Stream)> work;
    bool taken = false;  // the worker runs it now
    bool done = false;
  };
  void DrainRing();
  void Once();
  void ServeTasks();
  // How long a wait may last before it looks again.
  absl::Duration Patience() const;

  StepContext& context_;
  const SlotId slot_;
  const kernels::Stream stream_;
  RecordTable records_;
  const std::unique_ptr<Courier> courier_;
  uint64_t step_ = 0;
  bool refused_ = false;  // a record broke the protocol: no more is read
  std::atomic<bool> stopped_{false};

  absl::Mutex mu_;
  std::vector<Task*> tasks_ ABSL_GUARDED_BY(mu_);
  std::atomic<int> waiting_tasks_{0};
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_PROGRESS_H_
