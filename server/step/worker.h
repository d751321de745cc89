// The thread of one slot.
#ifndef DMUON_SERVER_STEP_WORKER_H_
#define DMUON_SERVER_STEP_WORKER_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "server/step/context.h"
#include "server/step/progress.h"
#include "server/step/step.h"

namespace dmuon::server {

// Owns the slot's private memory: state and workspace. Made when the session is configured; runs until it is destroyed.
class Worker {
 public:
  // A worker whose memory() is known, and nothing else: no device is asked.
  static absl::StatusOr<std::unique_ptr<Worker>> Plan(StepContext& context, SlotId slot);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Makes the updates of what the slot owns, which may measure on its device: takes planning_bytes, and gives them back.
  // blocks() and forms() are known after it. Once.
  absl::Status MakeUpdates();
  // Takes the memory, and fills `context.state` of what the slot owns. Once. RESOURCE_EXHAUSTED names the bytes.
  absl::Status Allocate();
  // Starts the thread. Once, after every slot's worker has allocated.
  void Start();
  // Any thread. A step under way is finished, then the thread ends.
  void Stop() {
    if (progress_) progress_->Stop();
  }
  // After Stop, of all workers: nothing of this slot runs any more.
  void Join();
  // As Progress::Run.
  absl::Status Run(uint64_t step, absl::FunctionRef<void(kernels::Stream)> work) {
    return progress_->Run(step, work);
  }

  // Any thread, outside of steps and one call a session at a time: the masters of these parameters, which the slot owns, to all
  // trainers, and when it returns they are there.
  absl::Status Publish(absl::Span<const ParameterId> parameters);
  // Any thread. What the slot has enqueued is over.
  void Quiesce();

  const SlotMemory& memory() const { return memory_; }
  // What its Newton-Schulz runs on, for reports: "gram 12, direct 8" and "gram fp32".
  struct Forms {
    int gram = 0;
    int direct = 0;
    std::string kernel;
  };
  Forms forms() const { return forms_; }
  // The blocks of all that the slot owns, in the order of its part of the step log.
  struct OwnedBlock {
    ParameterId parameter;
    BlockPlan plan;
  };
  const std::vector<OwnedBlock>& blocks() const { return blocks_; }

 private:
  Worker(StepContext& context, SlotId slot) : context_(context), slot_(slot) {}
  void Loop();

  StepContext& context_;
  const SlotId slot_;
  kernels::Stream stream_;
  bool has_stream_ = false;
  void* state_ = nullptr;
  void* workspace_ = nullptr;
  SlotMemory memory_;
  size_t workspace_bytes_ = 0;  // of the updates
  Forms forms_;
  std::vector<OwnedBlock> blocks_;
  std::vector<PlannedUpdate> planned_;  // until Allocate
  std::unique_ptr<Progress> progress_;
  std::unique_ptr<Step> step_;
  std::thread thread_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_WORKER_H_
