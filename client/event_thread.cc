#include "client/event_thread.h"

#include <pthread.h>

#include "absl/time/time.h"
#include "base/status_macros.h"
#include "client/page_wait.h"

namespace dmuon::client {
namespace {

constexpr unsigned kBlockingSync = 1, kDisableTiming = 2;

}  // namespace

absl::StatusOr<std::unique_ptr<EventThread>> EventThread::Start(
    const CudaRuntime& cuda, int device, int windows, int events,
    std::function<absl::Status(const Work&)> act) {
  std::unique_ptr<EventThread> thread(new EventThread(cuda, device, windows, std::move(act)));
  const CudaDeviceScope scope(cuda, device);
  RETURN_IF_ERROR(scope.status());
  absl::MutexLock lock(&thread->mu_);
  for (int i = 0; i < events; ++i) {
    void* event = nullptr;
    RETURN_IF_ERROR(
        cuda.Check(cuda.event_create(&event, kBlockingSync | kDisableTiming), "creating an event"));
    thread->free_.push_back(event);
  }
  thread->pending_.reserve(static_cast<size_t>(events));
  thread->thread_ = std::thread([t = thread.get()] { t->Run(); });
  pthread_setname_np(thread->thread_.native_handle(), "dmuon-events");
  return thread;
}

EventThread::~EventThread() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  absl::MutexLock lock(&mu_);
  for (const Pending& p : pending_) free_.push_back(p.event);
  for (void* event : free_) cuda_.event_destroy(event);
}

absl::Status EventThread::After(void* stream, const Work& work) {
  // The default stream is the current device's.
  const CudaDeviceScope scope(cuda_, device_);
  RETURN_IF_ERROR(scope.status());
  absl::MutexLock lock(&mu_);
  const auto room = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !free_.empty() || !failure_.ok();
  };
  mu_.Await(absl::Condition(&room));
  RETURN_IF_ERROR(failure_);
  void* event = free_.back();
  RETURN_IF_ERROR(cuda_.Check(cuda_.event_record(event, stream), "recording an event"));
  free_.pop_back();
  pending_.push_back({event, work});
  ++of_window_[static_cast<size_t>(work.window)];
  return absl::OkStatus();
}

void EventThread::Run() {
  // Not a scope: going back at the end would make a context on the device that is current in a new thread.
  const absl::Status selected = cuda_.Check(cuda_.set_device(device_), "selecting a device");
  absl::MutexLock lock(&mu_);
  failure_.Update(selected);
  for (;;) {
    const auto more = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return stopping_ || !pending_.empty();
    };
    mu_.Await(absl::Condition(&more));
    if (stopping_) return;
    const Pending next = pending_.front();
    mu_.Unlock();
    absl::Status status =
        cuda_.Check(cuda_.event_synchronize(next.event), "waiting for the gradients of a boundary");
    if (status.ok()) status = act_(next.work);
    mu_.Lock();
    pending_.erase(pending_.begin());
    free_.push_back(next.event);
    --of_window_[static_cast<size_t>(next.work.window)];
    failure_.Update(status);
    if (failure_.ok()) continue;
    for (const Pending& dropped : pending_) {
      free_.push_back(dropped.event);
      --of_window_[static_cast<size_t>(dropped.work.window)];
    }
    pending_.clear();
  }
}

absl::Status EventThread::Wait(absl::FunctionRef<bool()> done,
                               absl::FunctionRef<absl::Status()> look) {
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return done() || !failure_.ok(); };
  while (!mu_.AwaitWithTimeout(absl::Condition(&over), kLookEvery)) {
    mu_.Unlock();
    const absl::Status status = look();
    mu_.Lock();
    RETURN_IF_ERROR(status);
  }
  return failure_;
}

absl::Status EventThread::WaitWindow(int window, absl::FunctionRef<absl::Status()> look) {
  absl::MutexLock lock(&mu_);
  return Wait([this, window]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                  mu_) { return of_window_[static_cast<size_t>(window)] == 0; },
              look);
}

absl::Status EventThread::WaitAll(absl::FunctionRef<absl::Status()> look) {
  absl::MutexLock lock(&mu_);
  return Wait([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return pending_.empty(); }, look);
}

}  // namespace dmuon::client
