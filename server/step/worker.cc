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

uint64_t StateBytes(const ParameterTable& table, const server::Plan& plan, SlotId slot) {
  uint64_t bytes = 0;
  uint64_t pieces = 0;
  for (ParameterId p : plan.owned[slot.index()]) {
    bytes += ArrayBytes(table.parameters[p.index()]);
    pieces += plan.transfers[p.index()].pieces.size();
  }
  return bytes + AlignUp(sizeof(double) * pieces, kAlignment);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Plan(StepContext& context, SlotId slot) {
  std::unique_ptr<Worker> worker(new Worker(context, slot));
  worker->state_bytes_ = StateBytes(context.table, context.plan, slot);
  for (ParameterId p : context.plan.owned[slot.index()]) {
    ASSIGN_OR_RETURN(std::unique_ptr<Update> update,
                     MakeUpdate(context.backend(slot), context.parameter(p), context.optimizer,
                                context.state[p.index()]));
    worker->workspace_bytes_ = std::max(worker->workspace_bytes_, update->workspace_bytes());
    for (const BlockPlan& block : update->blocks()) {
      ++(block.form == "gram" ? worker->forms_.gram : worker->forms_.direct);
      worker->forms_.kernel = block.kernel;
      worker->blocks_.push_back({p, block});
    }
    worker->planned_.push_back(std::move(update));
  }
  return worker;
}

absl::Status Worker::Allocate() {
  kernels::Backend& backend = context_.backend(slot_);
  ASSIGN_OR_RETURN(stream_, backend.CreateStream());
  has_stream_ = true;
  if (state_bytes_ > 0) {
    ASSIGN_OR_RETURN(state_, backend.Allocate(state_bytes_));
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
  for (const auto& update : planned_) {
    RETURN_IF_ERROR(update->Prepare(static_cast<std::byte*>(workspace_)));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Courier> courier, MakeCourier(context_, slot_, stream_));
  progress_ = std::make_unique<Progress>(context_, slot_, stream_, std::move(courier));
  step_ = std::make_unique<Step>(context_, slot_, stream_, *progress_, std::move(planned_),
                                 static_cast<std::byte*>(workspace_));
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

SlotMemory Worker::memory() const {
  const uint64_t grain = context_.backend(slot_).shares_by_handle() ? kDeviceGrain : 1;
  return {AlignUp(context_.layout.grad_bytes, grain), AlignUp(context_.layout.weight_bytes, grain),
          state_bytes_, workspace_bytes_, StagingBytes(context_, slot_)};
}

}  // namespace dmuon::server
