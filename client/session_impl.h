// What a session is made of; for the files of this library and for tests that write records by
// hand.
#ifndef DMUON_CLIENT_SESSION_IMPL_H_
#define DMUON_CLIENT_SESSION_IMPL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/connection_impl.h"
#include "client/device_arena.h"
#include "client/dmuon/client.h"
#include "client/event_thread.h"
#include "client/mapping.h"
#include "client/page_wait.h"
#include "dmuon/v1/trainer.pb.h"
#include "proto/wire/control_page.h"

namespace dmuon::client {

enum class Phase { kOpened, kConfigured, kStarted, kLost, kClosed };

struct Session::Impl {
  ~Impl();  // frees the arenas, of which there are views until now

  Connection::Impl* connection = nullptr;
  uint64_t id = 0;
  uint32_t rank = 0;
  std::string job;
  bool z3 = false;
  std::vector<Boundary> boundaries;
  std::vector<Parameter> parameters;
  uint64_t table_digest = 0;
  Placement placement;

  // The daemon computes on GPUs: GRAD and WEIGHT are this process's device memory.
  bool by_handle = false;
  std::optional<int> wanted_device;
  const CudaRuntime* cuda = nullptr;  // with by_handle, from Configure on
  int device = 0;
  std::string gpu;

  // Set once by Configure.
  Mapping control, grad, weight;
  DeviceArena device_grad, device_weight;
  bool registered = false;  // the daemon may have mapped them
  bool let_go = false;      // and no longer has: they can be freed
  std::byte* grad_base = nullptr;
  std::byte* weight_base = nullptr;
  wire::ControlPage page;
  std::vector<uint64_t> grad_offset, weight_offset;  // by parameter
  std::vector<int> window;                           // by boundary

  std::atomic<Phase> phase{Phase::kOpened};
  std::atomic<uint64_t> step{0};
  std::atomic<uint64_t> generation{1};
  std::atomic<uint32_t> backwards{0};  // synchronised ones in this generation

  // The ring has one producer at a time; what a record says and its place in the ring belong
  // together.
  absl::Mutex push_mu;
  std::vector<uint32_t> micro
      ABSL_GUARDED_BY(push_mu);  // by boundary: READY records in this generation
  // By window: the micro that was written there last, and by which boundary.
  struct LastUse {
    uint32_t boundary = 0;
    uint64_t mark = 0;  // 0: never
  };
  std::vector<LastUse> last_use ABSL_GUARDED_BY(push_mu);
  std::vector<int> holder
      ABSL_GUARDED_BY(push_mu);  // by window: the materialised boundary, or -1 (Z3)
  uint64_t ticket ABSL_GUARDED_BY(push_mu) = 0;
  std::atomic<uint64_t> steps_sent{0};  // STEP records
  // With by_handle, from Start on. A thread each: what a boundary's backward leaves comes long after another's last reader, and
  // whoever wants that window must not wait for both.
  std::unique_ptr<EventThread> readies, releases;

  // FAILED_PRECONDITION unless started; in a forked child; UNAVAILABLE once the session is lost.
  absl::Status CheckStarted() const;
  // Waits on the page; an error other than CANCELLED loses the session.
  absl::Status Wait(absl::FunctionRef<bool()> done, absl::Duration tick = kLookEvery);
  // Lets `fill` complete a record that has generation, epoch and digest, and pushes it; waits while
  // the ring is full. `fill` may run again after such a wait, and touches nothing but the record
  // and what push_mu guards.
  absl::Status Push(wire::RecordType type, absl::FunctionRef<absl::Status(wire::Record&)> fill,
                    absl::FunctionRef<void(const wire::Record&)> pushed)
      ABSL_LOCKS_EXCLUDED(push_mu);
  // The records behind Session::Ready and Session::Release. REQUIRES: a boundary of the table.
  absl::Status PushReady(int boundary) ABSL_LOCKS_EXCLUDED(push_mu);
  absl::Status PushRelease(int boundary) ABSL_LOCKS_EXCLUDED(push_mu);
  // Begins to collect gradients for generation `next`.
  void NextGeneration(uint64_t next) ABSL_LOCKS_EXCLUDED(push_mu);

  // Configure, after the daemon's answer.
  absl::Status Adopt(const OptimizerOptions& options, const v1::ConfigureGroupsResponse& response);
  absl::Status MapArenas(const v1::ConfigureGroupsResponse& response);
  // With by_handle; session_device.cc.
  absl::Status ChooseDevice();
  absl::Status AllocateArenas(uint64_t grad_bytes, uint64_t weight_bytes);
  absl::Status DescribeArenas(v1::RegisterBuffersRequest& request) const;
  absl::StatusOr<uint64_t> Confirm(const v1::RegisterBuffersResponse& response);
  absl::Status StartEvents();
  // Whether the daemon has let go of the arenas, after it was asked to close.
  void NoteClosed(const absl::Status& closed);
  absl::Status Later(EventThread::Kind kind, int boundary, DeviceStream stream);
  // Until the event thread has done what was asked for, of this window or at all.
  absl::Status Settle();
  absl::Status SettleWindow(int of_boundary);
};

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_SESSION_IMPL_H_
