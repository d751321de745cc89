// Waits for a device's events, so that the thread that launches a trainer's kernels never does.
#ifndef DMUON_CLIENT_EVENT_THREAD_H_
#define DMUON_CLIENT_EVENT_THREAD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cuda_runtime.h"

namespace dmuon::client {

// Thread-safe. What is asked for first is done first; after a failure nothing more is done, and every call returns it.
class EventThread {
 public:
  enum class Kind { kReady, kRelease };
  struct Work {
    Kind kind = Kind::kReady;
    int boundary = 0;
    int window = 0;
  };

  // Makes `events` events: as many may be under way. `act` runs on the thread.
  static absl::StatusOr<std::unique_ptr<EventThread>> Start(
      const CudaRuntime& cuda, int device, int windows, int events,
      std::function<absl::Status(const Work&)> act);
  // Work that the device has not come to is dropped.
  ~EventThread();
  EventThread(const EventThread&) = delete;
  EventThread& operator=(const EventThread&) = delete;

  // Returns at once, unless all events are under way; `work` is done when `stream` (cudaStream_t) has come here.
  absl::Status After(void* stream, const Work& work);
  // Until nothing of this window, or nothing at all, is under way. `look` is asked about ten times a second: an error of
  // its ends the wait.
  absl::Status WaitWindow(int window, absl::FunctionRef<absl::Status()> look);
  absl::Status WaitAll(absl::FunctionRef<absl::Status()> look);

 private:
  struct Pending {
    void* event;
    Work work;
  };
  EventThread(const CudaRuntime& cuda, int device, int windows,
              std::function<absl::Status(const Work&)> act)
      : cuda_(cuda), device_(device), act_(std::move(act)), of_window_(windows, 0) {}
  void Run();
  absl::Status Wait(absl::FunctionRef<bool()> done, absl::FunctionRef<absl::Status()> look)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const CudaRuntime& cuda_;
  const int device_;
  const std::function<absl::Status(const Work&)> act_;

  absl::Mutex mu_;
  std::vector<void*> free_ ABSL_GUARDED_BY(mu_);       // events
  std::vector<Pending> pending_ ABSL_GUARDED_BY(mu_);  // oldest first; reserved
  std::vector<int> of_window_ ABSL_GUARDED_BY(mu_);    // work under way
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_EVENT_THREAD_H_
