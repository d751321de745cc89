#include "server/step/worker.h"

#include <pthread.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "base/checked_math.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

constexpr size_t kAlignment = 256;
constexpr uint64_t kDeviceGrain =
    2 << 20;  // what a trainer allocates on a device is a multiple of it

uint64_t ArrayBytes(const Parameter& p) {
  return AlignUp(sizeof(float) * ArraysOf(p.route) * p.numel(), kAlignment);
}

// The arrays of what the slot owns, and the sums of a step: of each piece of a gradient, and what the updates leave.
uint64_t StateBytes(const ParameterTable& table, const server::Plan& plan, SlotId slot) {
  uint64_t bytes = 0;
  uint64_t sums = 0;
  for (ParameterId p : plan.owned[slot.index()]) {
    bytes += ArrayBytes(table.parameters[p.index()]);
    sums += plan.transfers[p.index()].pieces.size() + SumsOf(table.parameters[p.index()]);
  }
  return bytes + AlignUp(sizeof(double) * sums, kAlignment);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Plan(StepContext& context, SlotId slot) {
  std::unique_ptr<Worker> worker(new Worker(context, slot));
  const kernels::Backend& backend = context.backend(slot);
  SlotMemory& memory = worker->memory_;
  for (ParameterId p : context.plan.owned[slot.index()]) {
    ASSIGN_OR_RETURN(const UpdateMemory update,
                     PlanUpdate(backend, context.parameter(p), context.optimizer));
    worker->workspace_bytes_ = std::max(worker->workspace_bytes_, update.workspace_bytes);
    memory.planning_bytes = std::max<uint64_t>(memory.planning_bytes, update.planning_bytes);
  }
  const CourierNeeds courier = NeedsOfCourier(context, slot);
  const uint64_t streams = 1 + courier.streams;
  const kernels::StreamMemory stream = backend.MemoryOfStream();
  const uint64_t grain = backend.shares_by_handle() ? kDeviceGrain : 1;
  memory.grad_bytes = AlignUp(context.layout.grad_bytes, grain);
  memory.weight_bytes = AlignUp(context.layout.weight_bytes, grain);
  memory.state_bytes = StateBytes(context.table, context.plan, slot);
  memory.workspace_bytes = worker->workspace_bytes_ + streams * stream.device_bytes;
  memory.staging_bytes = courier.staging_bytes;
  memory.control_bytes = context.layout.control_bytes;
  memory.page_locked_bytes = streams * stream.page_locked_bytes;
  return worker;
}

absl::Status Worker::MakeUpdates() {
  NewtonSchulzPlans plans(context_.backend(slot_), context_.optimizer);
  for (ParameterId p : context_.plan.owned[slot_.index()]) {
    ASSIGN_OR_RETURN(std::unique_ptr<Update> update,
                     MakeUpdate(plans, context_.parameter(p), context_.state[p.index()]));
    for (const BlockPlan& block : update->blocks()) {
      ++(block.form == "gram" ? forms_.gram : forms_.direct);
      forms_.kernel = block.kernel;
      blocks_.push_back({p, block});
    }
    planned_.push_back({std::move(update), {}});
  }
  return absl::OkStatus();
}

absl::Status Worker::Allocate() {
  kernels::Backend& backend = context_.backend(slot_);
  ASSIGN_OR_RETURN(stream_, backend.CreateStream());
  has_stream_ = true;
  if (memory_.state_bytes > 0) {
    ASSIGN_OR_RETURN(state_, backend.Allocate(memory_.state_bytes));
  }
  if (workspace_bytes_ > 0) {
    ASSIGN_OR_RETURN(workspace_, backend.Allocate(workspace_bytes_));
  }
  std::byte* at = static_cast<std::byte*>(state_);
  const std::vector<ParameterId>& owned = context_.plan.owned[slot_.index()];
  for (ParameterId p : owned) {
    const Parameter& parameter = context_.parameter(p);
    Assign(parameter.route, parameter.numel(), reinterpret_cast<float*>(at),
           context_.state[p.index()]);
    at += ArrayBytes(parameter);
  }
  double* sums = reinterpret_cast<double*>(at);
  for (ParameterId p : owned) {
    context_.state[p.index()].square_sum = sums;
    sums += context_.plan.transfers[p.index()].pieces.size();
  }
  for (size_t i = 0; i < owned.size(); ++i) {
    PlannedUpdate& planned = planned_[i];
    planned.place = {static_cast<std::byte*>(workspace_), sums};
    sums += SumsOf(context_.parameter(owned[i]));
    RETURN_IF_ERROR(planned.update->Prepare(planned.place));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Courier> courier, MakeCourier(context_, slot_, stream_));
  progress_ = std::make_unique<Progress>(context_, slot_, stream_, std::move(courier));
  step_ = std::make_unique<Step>(context_, slot_, stream_, *progress_, std::move(planned_));
  return absl::OkStatus();
}

void Worker::Join() {
  if (thread_.joinable()) thread_.join();
}

absl::Status Worker::Publish(absl::Span<const ParameterId> parameters) {
  Courier& courier = progress_->courier();
  absl::Status enqueued;
  Sent last;
  RETURN_IF_ERROR(Run(0, [&](kernels::Stream stream) {
    for (ParameterId p : parameters) last = courier.Publish(p, /*changed=*/true);
    enqueued = context_.backend(slot_).Synchronize(stream);
  }));
  RETURN_IF_ERROR(enqueued);
  return courier.Await(last);
}

void Worker::Quiesce() {
  Run(0, [this](kernels::Stream stream) {
    Settle(context_.backend(slot_), stream);
    progress_->courier().Quiesce();
  }).IgnoreError();
}

Worker::~Worker() {
  Stop();
  Join();
  step_.reset();
  progress_.reset();
  kernels::Backend& backend = context_.backend(slot_);
  if (has_stream_) Settle(backend, stream_);
  if (workspace_ != nullptr) backend.Free(workspace_);
  if (state_ != nullptr) backend.Free(state_);
  if (has_stream_) backend.DestroyStream(stream_);
}

void Worker::Start() {
  thread_ = std::thread([this] { Loop(); });
  pthread_setname_np(thread_.native_handle(), absl::StrFormat("slot-%d", slot_.value()).c_str());
}

void Worker::Loop() {
  while (progress_->Until([this] { return progress_->records().step().has_value(); },
                          absl::InfiniteFuture())) {
    context_.steps_under_way.fetch_add(1);
    step_->Run();
    context_.steps_under_way.fetch_sub(1);
  }
  // The others' steps may still need this slot's part.
  if (context_.exchanges != nullptr)
    progress_->DrainUntil([this] { return context_.steps_under_way.load() == 0; });
}

}  // namespace dmuon::server
