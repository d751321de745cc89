#include "server/step/reduce.h"

#include <algorithm>

#include "server/step/micros.h"

namespace dmuon::server {

Reducer::Reducer(StepContext& context, SlotId slot, kernels::Stream stream)
    : context_(context),
      slot_(slot),
      stream_(stream),
      owned_(context.table.boundaries.size()),
      progress_(context.table.boundaries.size()) {
  inputs_.reserve(context.slots());
  unread_.reserve(context.table.boundaries.size());
  for (ParameterId p : context.plan.owned[slot.index()]) {
    const BoundaryId b = context.parameter(p).boundary;
    if (owned_[b.index()].empty()) boundaries_.push_back(b);
    owned_[b.index()].push_back(p);
  }
}

Reducer::Progress& Reducer::At(BoundaryId boundary, uint64_t generation) {
  Progress& progress = progress_[boundary.index()];
  if (progress.generation != generation) progress = {generation, 0};
  return progress;
}

bool Reducer::Has(BoundaryId boundary, uint64_t generation) const {
  const Progress& progress = progress_[boundary.index()];
  return progress.generation == generation && progress.micros > 0;
}

void Reducer::ReduceReady(uint64_t generation) {
  DropBefore(generation);
  for (BoundaryId b : boundaries_) {
    Progress& progress = At(b, generation);
    while (progress.micros < ReadableMicros(context_, b, generation)) ReadMicro(b, progress);
  }
  Settle();
}

// This slot has left the generations before `generation`: a rank that still collects one of them must not wait for it.
void Reducer::DropBefore(uint64_t generation) {
  if (generation == generation_) return;
  generation_ = generation;
  for (BoundaryId b : boundaries_) MarkConsumed(b, wire::ConsumedMark(generation - 1, 0xfffe));
}

void Reducer::ReduceRest(uint64_t generation) {
  for (BoundaryId b : boundaries_) {
    Progress& progress = At(b, generation);
    const uint32_t sent = SentMicros(context_, b, generation);
    while (progress.micros < sent) ReadMicro(b, progress);
  }
}

void Reducer::ReadMicro(BoundaryId boundary, Progress& progress) {
  const uint32_t micro = progress.micros;
  for (ParameterId p : owned_[boundary.index()]) {
    const Dtype dtype = context_.optimizer.parameters[p.index()].grad_dtype;
    const ParameterState& state = context_.state[p.index()];
    double* square_sum = state.square_sum;
    for (const Piece& piece : context_.plan.transfers[p.index()].pieces) {
      inputs_.clear();
      for (SlotId holder : piece.holders) {
        if (AnnouncedMicros(context_, holder, boundary, progress.generation) <= micro) continue;
        if (!context_.Reachable(holder)) continue;  // it has left: nothing will come of this step
        inputs_.push_back(context_.arenas[holder.index()].grad.data() +
                          context_.layout.grad_offset[p.index()] +
                          piece.range.begin * ByteSize(dtype));
      }
      context_.backend(slot_).MeanOverRanks(stream_,
                                            {.inputs = inputs_,
                                             .dtype = dtype,
                                             .count = piece.range.size(),
                                             .divisor = static_cast<float>(piece.holders.size()),
                                             .accumulate = micro > 0,
                                             .mean = state.gradient + piece.range.begin,
                                             .square_sum = square_sum++});
    }
  }
  ++progress.micros;
  // A trainer that keeps to the protocol has one micro of a boundary under way.
  if (unread_.size() == unread_.capacity()) {
    context_.backend(slot_).Synchronize(stream_).IgnoreError();
    Settle();
  }
  unread_.push_back({boundary, wire::ConsumedMark(progress.generation, micro),
                     context_.backend(slot_).Mark(stream_)});
  Settle();
}

void Reducer::Settle() {
  size_t read = 0;
  for (; read < unread_.size(); ++read) {
    const absl::StatusOr<bool> reached =
        context_.backend(slot_).Reached(stream_, unread_[read].mark);
    // What a device could not read it will not be able to commit either: the step sees the failure.
    if (reached.ok() && !*reached) break;
    MarkConsumed(unread_[read].boundary, unread_[read].consumed);
  }
  unread_.erase(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(read));
}

// A trainer may write over its gradients once all owners have read them; the last owner says so. Marks only rise.
void Reducer::MarkConsumed(BoundaryId boundary, uint64_t mark) {
  context_.consumed_by(boundary, slot_).store(mark, std::memory_order_seq_cst);
  uint64_t all = mark;
  for (SlotId owner : context_.plan.owners[boundary.index()]) {
    all = std::min(all, context_.consumed_by(boundary, owner).load(std::memory_order_seq_cst));
  }
  for (int s = 0; s < context_.slots(); ++s) {
    const wire::ControlPage& page = context_.page(SlotId(s));
    std::atomic<uint64_t>& word = page.boundary(boundary.value()).grads_consumed;
    uint64_t before = word.load(std::memory_order_relaxed);
    while (before < all && !word.compare_exchange_weak(before, all, std::memory_order_release)) {
    }
    if (before < all) page.RingTrainer();
  }
}

}  // namespace dmuon::server
