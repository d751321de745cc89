#include "server/step/progress.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace dmuon::server {
namespace {

// Every wait looks again after this long, whatever the doorbells did.
constexpr absl::Duration kLookAgain = absl::Milliseconds(100);
// No doorbell rings when a device is done: it is asked this often.
constexpr absl::Duration kAskDevice = absl::Microseconds(20);

}  // namespace

Progress::Progress(StepContext& context, SlotId slot, kernels::Stream stream,
                   std::unique_ptr<Courier> courier)
    : context_(context),
      slot_(slot),
      stream_(stream),
      records_(context, slot),
      courier_(std::move(courier)) {}

absl::Status Progress::Run(uint64_t step, absl::FunctionRef<void(kernels::Stream)> work) {
  Task task{step, work};
  absl::MutexLock lock(&mu_);
  tasks_.push_back(&task);
  waiting_tasks_.fetch_add(1);
  context_.page(slot_).RingDaemon();
  const auto over = [&]() { return task.done || (stopped() && !task.taken); };
  while (!over()) mu_.AwaitWithTimeout(absl::Condition(&over), kLookAgain);
  if (task.done) return absl::OkStatus();
  tasks_.erase(std::find(tasks_.begin(), tasks_.end(), &task));
  waiting_tasks_.fetch_sub(1);
  return absl::UnavailableError("the session has ended");
}

void Progress::ServeTasks() {
  if (waiting_tasks_.load(std::memory_order_acquire) == 0) return;
  absl::ReleasableMutexLock lock(&mu_);
  const auto it = std::find_if(tasks_.begin(), tasks_.end(),
                               [this](const Task* t) { return t->step <= step_; });
  if (it == tasks_.end()) return;
  Task* task = *it;
  tasks_.erase(it);
  waiting_tasks_.fetch_sub(1);
  task->taken = true;
  lock.Release();
  task->work(stream_);
  absl::MutexLock done(&mu_);
  task->done = true;
}

void Progress::Stop() {
  stopped_.store(true, std::memory_order_release);
  context_.page(slot_).RingDaemon();
}

void Progress::Drain() {
  DrainRing();
  courier_->Advance(/*gradients=*/false);
}

void Progress::DrainRing() {
  if (!refused_) {
    if (const absl::Status status = records_.Drain(); !status.ok()) {
      refused_ = true;
      context_.FailSlot(slot_, status);
    }
  }
  if (!records_.materializations().empty()) {
    courier_->FillWindows(step_, records_.materializations());
  }
}

void Progress::Once() {
  DrainRing();
  courier_->FetchReady(records_.generation());
}

absl::Duration Progress::Patience() const {
  const bool device =
      courier_->Busy() ||
      std::any_of(records_.materializations().begin(), records_.materializations().end(),
                  [](const Materialization& m) { return m.mark.has_value(); });
  return device ? kAskDevice : kLookAgain;
}

void Progress::DrainUntil(absl::FunctionRef<bool()> done) {
  const wire::ControlPage& page = context_.page(slot_);
  while (!done()) {
    const uint32_t seen = page.DaemonDoorbell();
    DrainRing();
    courier_->Advance(/*gradients=*/true);
    page.DaemonWait(seen, kAskDevice);
  }
}

bool Progress::Until(absl::FunctionRef<bool()> done, absl::Time deadline) {
  const wire::ControlPage& page = context_.page(slot_);
  for (;;) {
    const uint32_t seen = page.DaemonDoorbell();
    Once();
    if (done()) return true;
    ServeTasks();
    if (stopped()) return false;
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    if (waiting_tasks_.load(std::memory_order_acquire) > 0 && page.DaemonDoorbell() != seen)
      continue;
    page.DaemonWait(seen, std::min(left, Patience()));
  }
}

}  // namespace dmuon::server
