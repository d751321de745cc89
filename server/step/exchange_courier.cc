#include "server/step/exchange_courier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/checked_math.h"
#include "base/status_macros.h"
#include "server/step/micros.h"
#include "server/step/publish.h"

namespace dmuon::server {
namespace {

constexpr uint64_t kAlignment = 256;

struct Sizes {
  uint64_t out = 0;
  uint64_t in = 0;
};

// Of one place: the largest that this slot sends, and the largest that it receives.
Sizes PlaceSizes(const StepContext& context, SlotId slot) {
  Sizes sizes;
  for (size_t p = 0; p < context.table.parameters.size(); ++p) {
    const ParameterConfig& config = context.optimizer.parameters[p];
    const auto count = static_cast<uint64_t>(context.table.parameters[p].numel());
    const uint64_t gradient = count * ByteSize(config.grad_dtype);
    const uint64_t weight = count * ByteSize(config.param_dtype);
    const bool owned = context.plan.transfers[p].owner == slot;
    sizes.out = std::max({sizes.out, gradient, weight});
    sizes.in =
        std::max(sizes.in, owned ? gradient * static_cast<uint64_t>(context.slots()) : weight);
  }
  return {AlignUp(sizes.out, kAlignment), AlignUp(sizes.in, kAlignment)};
}

}  // namespace

CourierNeeds ExchangeCourier::Needs(const StepContext& context, SlotId slot) {
  const Sizes sizes = PlaceSizes(context, slot);
  return {.staging_bytes = kPlaces * (sizes.out + sizes.in), .streams = 1};
}

absl::StatusOr<std::unique_ptr<Courier>> ExchangeCourier::Create(StepContext& context, SlotId slot,
                                                                 kernels::Stream stream) {
  std::unique_ptr<ExchangeCourier> courier(new ExchangeCourier(context, slot, stream));
  RETURN_IF_ERROR(courier->Allocate());
  return std::unique_ptr<Courier>(std::move(courier));
}

ExchangeCourier::ExchangeCourier(StepContext& context, SlotId slot, kernels::Stream stream)
    : context_(context),
      queue_(*context.exchanges),
      slot_(slot),
      stream_(stream),
      epoch_(queue_.current()),
      fetched_(context.table.boundaries.size(), 0) {
  inputs_.reserve(context.slots());
  unread_.reserve(2 * context.table.boundaries.size());
}

absl::Status ExchangeCourier::Allocate() {
  ASSIGN_OR_RETURN(aside_, backend().CreateStream());
  has_aside_ = true;
  const Sizes sizes = PlaceSizes(context_, slot_);
  ASSIGN_OR_RETURN(staging_, backend().Allocate(Needs(context_, slot_).staging_bytes));
  std::byte* at = static_cast<std::byte*>(staging_);
  for (Place& place : places_) {
    place.out = at;
    place.in = at + sizes.out;
    at += sizes.out + sizes.in;
  }
  return absl::OkStatus();
}

ExchangeCourier::~ExchangeCourier() {
  if (has_aside_) Quiesce();
  if (staging_ != nullptr) backend().Free(staging_);
  if (has_aside_) backend().DestroyStream(aside_);
}

void ExchangeCourier::Quiesce() { server::Settle(backend(), aside_); }

// ---- gradients

void ExchangeCourier::FetchReady(uint64_t generation) {
  Drop(generation);
  bool changed = false;
  for (size_t i = 0; i < fetched_.size(); ++i) {
    const BoundaryId b(static_cast<int32_t>(i));
    queue_.AppendGradients(
        b, generation, [&] { return ReadableMicros(context_, b, generation); }, changed);
  }
  if (changed) context_.RingWorkers();
  Advance(true);
}

// A trainer that still collects a generation that this slot has left must not wait for it.
void ExchangeCourier::Drop(uint64_t generation) {
  if (generation == generation_) return;
  generation_ = generation;
  for (size_t b = 0; b < fetched_.size(); ++b) {
    MarkConsumed(BoundaryId(static_cast<int32_t>(b)), wire::ConsumedMark(generation - 1, 0xfffe));
  }
}

void ExchangeCourier::FetchRest(uint64_t generation) {
  rest_generation_ = generation;
  rest_end_.reset();
  AppendRest();
  Advance(true);
}

void ExchangeCourier::AppendRest() {
  bool changed = false, all = true;
  for (size_t i = 0; i < fetched_.size(); ++i) {
    const BoundaryId b(static_cast<int32_t>(i));
    all &= queue_.AppendGradients(
        b, rest_generation_, [&] { return SentMicros(context_, b, rest_generation_); }, changed);
  }
  if (changed) context_.RingWorkers();
  if (all) rest_end_ = queue_.end();
}

absl::StatusOr<bool> ExchangeCourier::Fetched() {
  RETURN_IF_ERROR(context_.failure());
  if (lost_generation_ == rest_generation_) return lost_;
  if (!rest_end_.has_value()) AppendRest();
  return rest_end_.has_value() && finished_ >= *rest_end_;
}

bool ExchangeCourier::Has(BoundaryId boundary, uint64_t generation) const {
  return fetched_[boundary.index()] == generation;
}

void ExchangeCourier::Settle() {
  size_t read = 0;
  for (; read < unread_.size(); ++read) {
    const absl::StatusOr<bool> reached = backend().Reached(aside_, unread_[read].mark);
    if (reached.ok() && !*reached) break;  // a failure is seen when the exchange is finished
    MarkConsumed(unread_[read].boundary, unread_[read].consumed);
  }
  unread_.erase(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(read));
}

// Nobody but this slot reads its trainer's gradients. Marks only rise.
void ExchangeCourier::MarkConsumed(BoundaryId boundary, uint64_t mark) {
  const wire::ControlPage& page = context_.page(slot_);
  std::atomic<uint64_t>& word = page.boundary(boundary.value()).grads_consumed;
  if (word.load(std::memory_order_relaxed) >= mark) return;
  word.store(mark, std::memory_order_release);
  page.RingTrainer();
}

// ---- weights

Sent ExchangeCourier::Publish(ParameterId parameter, bool changed) {
  Sent sent{backend().Mark(stream_)};
  if (!changed || context_.z3 || !context_.arenas_there.load(std::memory_order_acquire))
    return sent;
  sent.position = queue_.AppendWeight(parameter);
  context_.RingWorkers();
  Advance(false);
  return sent;
}

absl::StatusOr<bool> ExchangeCourier::Arrived(const Sent& sent) {
  ASSIGN_OR_RETURN(const bool reached, backend().Reached(stream_, sent.mark));
  if (!reached) return false;
  if (queue_.finished_by_all() >= sent.position) return true;
  RETURN_IF_ERROR(context_.failure());
  return false;
}

absl::Status ExchangeCourier::Await(const Sent& sent) {
  return queue_.AwaitFinished(sent.position, [this] { return context_.failure(); });
}

void ExchangeCourier::FillWindows(uint64_t step, std::vector<Materialization>& wanted) {
  const auto filled = [&](Materialization& m) {
    if (!m.mark.has_value() && !RequestWindow(step, m)) return false;
    const absl::StatusOr<bool> reached = backend().Reached(stream_, *m.mark);
    if (!reached.ok()) {
      context_.FailSlot(slot_, Annotate(reached.status(), "filling a window"));
      return true;
    }
    if (!*reached || finished_ < m.position) return false;
    GrantWindow(context_, slot_, m);
    return true;
  };
  wanted.erase(std::remove_if(wanted.begin(), wanted.end(), filled), wanted.end());
}

// One-sided: the owners take part without their trainers, and cannot move on before this slot has sent its next STEP.
bool ExchangeCourier::RequestWindow(uint64_t step, Materialization& m) {
  const std::vector<ParameterId>& parameters = context_.plan.parameters[m.boundary.index()];
  if (!AllCommitted(context_, parameters, step)) return false;
  const std::optional<uint64_t> position = queue_.AppendWindow(parameters, slot_);
  if (!position.has_value()) return false;
  for (ParameterId p : parameters) {
    if (context_.plan.transfers[p.index()].owner == slot_)
      WriteInto(context_, slot_, stream_, p, slot_);
  }
  m.position = *position;
  m.mark = backend().Mark(stream_);
  context_.RingWorkers();
  return true;
}

// ---- exchanges

void ExchangeCourier::Advance(bool gradients) {
  Settle();
  Finish();
  if (!InEpoch()) return;
  Deliver(gradients);
  Finish();
  Submit();
}

bool ExchangeCourier::Busy() const {
  return !unread_.empty() || (!left_ && finished_ != queue_.end());
}

// Whether there is a communicator to work with. Lets go of one that was aborted, and enters the next.
bool ExchangeCourier::InEpoch() {
  if (left_) {
    if (queue_.epoch() == epoch_.number) return false;
    epoch_ = queue_.current();
    submitted_ = ended_ = finished_ = epoch_.first;
    left_ = false;
  }
  const DeviceCommunicator::State state = epoch_.communicator->state();
  if (state != DeviceCommunicator::State::kAborted)
    return state == DeviceCommunicator::State::kReady;
  if (finished_ < ended_) return false;  // staging memory is still in use
  left_ = true;
  if (!context_.failure().ok()) return false;
  if (const absl::Status next = queue_.Leave(submitted_); !next.ok())
    context_.FailSlot(slot_, next);
  context_.RingWorkers();
  return false;
}

void ExchangeCourier::Submit() {
  while (submitted_ < queue_.end() && submitted_ < finished_ + kPlaces &&
         unread_.size() < unread_.capacity()) {
    const QueuedExchange& e = queue_.At(submitted_);
    Place& place = PlaceOf(submitted_);
    place.number = place.mark = place.aside_mark = 0;
    if (Lost(e, submitted_)) {
      Lose(e);
    } else {
      const bool gradient = e.kind == QueuedExchange::Kind::kGradient;
      const Exchange exchange = gradient ? StageGradient(e, place) : StageWeight(e, place);
      const kernels::Stream behind = !gradient && Owns(e) ? stream_ : aside_;
      const absl::StatusOr<uint64_t> number =
          epoch_.communicator->Submit(slot_.value(), behind, exchange);
      if (!number.ok()) return epoch_.communicator->Abort(number.status());
      place.number = *number;
      if (gradient) digest_ = epoch_.communicator->digest(slot_.value());
    }
    ++submitted_;
  }
}

// Another slot may have had it in the epoch before; its trainer may have written since.
bool ExchangeCourier::Lost(const QueuedExchange& e, uint64_t position) const {
  return e.kind == QueuedExchange::Kind::kGradient && position < epoch_.void_before;
}

void ExchangeCourier::Lose(const QueuedExchange& e) {
  lost_generation_ = e.generation;
  lost_ = epoch_.lost;
  digest_ = 0;
  if (e.last) {
    MarkConsumed(context_.parameter(e.parameter).boundary,
                 wire::ConsumedMark(e.generation, e.micro));
  }
}

Exchange ExchangeCourier::StageGradient(const QueuedExchange& e, Place& place) {
  const Parameter& parameter = context_.parameter(e.parameter);
  const Dtype dtype = context_.optimizer.parameters[e.parameter.index()].grad_dtype;
  // What is not copied is sent as it lies there, and no owner reads it. Of the next generation there may be some already while
  // this slot is still at its step: another one has finished it, and appended what both trainers have sent since.
  const bool there = AnnouncedMicros(context_, slot_, parameter.boundary, e.generation) > e.micro;
  if (there && e.generation >= generation_ && context_.Reachable(slot_)) {
    backend().Copy(aside_, place.out,
                   context_.arenas[slot_.index()].grad.data() +
                       context_.layout.grad_offset[e.parameter.index()],
                   static_cast<size_t>(parameter.numel()) * ByteSize(dtype));
  }
  place.aside_mark = backend().Mark(aside_);
  if (e.last) {
    unread_.push_back(
        {parameter.boundary, wire::ConsumedMark(e.generation, e.micro), place.aside_mark});
  }
  return {.movement = Movement::kGather,
          .root = context_.plan.transfers[e.parameter.index()].owner.value(),
          .dtype = dtype,
          .count = parameter.numel(),
          .from = place.out,
          .to = place.in};
}

Exchange ExchangeCourier::StageWeight(const QueuedExchange& e, Place& place) {
  const int64_t count = context_.parameter(e.parameter).numel();
  const Dtype dtype = context_.optimizer.parameters[e.parameter.index()].param_dtype;
  const bool owns = Owns(e);
  if (owns) {
    backend().Publish(stream_, context_.state[e.parameter.index()].weight, dtype, place.out, count);
    place.mark = backend().Mark(stream_);
  }
  const bool window = e.kind == QueuedExchange::Kind::kWindow;
  return {.movement = window ? Movement::kSend : Movement::kBroadcast,
          .root = context_.plan.transfers[e.parameter.index()].owner.value(),
          .peer = window ? e.to.value() : 0,
          .dtype = dtype,
          .count = count,
          .from = place.out,
          .to = owns ? place.out : place.in};
}

void ExchangeCourier::Deliver(bool gradients) {
  for (; ended_ < submitted_; ++ended_) {
    const QueuedExchange& e = queue_.At(ended_);
    Place& place = PlaceOf(ended_);
    if (place.number == 0) continue;
    const absl::StatusOr<bool> ended = epoch_.communicator->Ended(slot_.value(), place.number);
    if (!ended.ok() || !*ended) return;
    if (!gradients && Owns(e) && e.kind == QueuedExchange::Kind::kGradient) return;
    if (ended_ < unpacked_) continue;
    Unpack(e, place);
    unpacked_ = ended_ + 1;
  }
}

void ExchangeCourier::Unpack(const QueuedExchange& e, Place& place) {
  if (e.kind == QueuedExchange::Kind::kGradient) return UnpackGradient(e, place);
  if (e.kind == QueuedExchange::Kind::kWindow && e.to != slot_) return;
  if (!context_.Reachable(slot_)) return;
  const Dtype dtype = context_.optimizer.parameters[e.parameter.index()].param_dtype;
  backend().Copy(aside_,
                 context_.arenas[slot_.index()].weight.data() +
                     context_.layout.weight_offset[e.parameter.index()],
                 Owns(e) ? place.out : place.in,
                 static_cast<size_t>(context_.parameter(e.parameter).numel()) * ByteSize(dtype));
  place.aside_mark = backend().Mark(aside_);
}

void ExchangeCourier::UnpackGradient(const QueuedExchange& e, Place& place) {
  if (!Owns(e)) return;
  const Parameter& parameter = context_.parameter(e.parameter);
  const Dtype dtype = context_.optimizer.parameters[e.parameter.index()].grad_dtype;
  const ParameterState& state = context_.state[e.parameter.index()];
  const std::vector<Piece>& pieces = context_.plan.transfers[e.parameter.index()].pieces;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    inputs_.clear();
    for (SlotId holder : piece.holders) {
      if (AnnouncedMicros(context_, holder, parameter.boundary, e.generation) <= e.micro) continue;
      inputs_.push_back(place.in + (holder.value() * parameter.numel() + piece.range.begin) *
                                       static_cast<int64_t>(ByteSize(dtype)));
    }
    if (inputs_.empty()) continue;  // every rank has dropped the generation since
    backend().MeanOverRanks(stream_, {.inputs = inputs_,
                                      .dtype = dtype,
                                      .count = piece.range.size(),
                                      .divisor = static_cast<float>(piece.holders.size()),
                                      .accumulate = e.micro > 0,
                                      .mean = state.gradient + piece.range.begin,
                                      .square_sum = state.square_sum + i});
  }
  fetched_[parameter.boundary.index()] = e.generation;
  place.mark = backend().Mark(stream_);
}

void ExchangeCourier::Finish() {
  const uint64_t before = finished_;
  for (; finished_ < ended_; ++finished_) {
    const Place& place = PlaceOf(finished_);
    absl::StatusOr<bool> reached = backend().Reached(stream_, place.mark);
    if (reached.ok() && *reached) reached = backend().Reached(aside_, place.aside_mark);
    if (reached.ok() && !*reached) break;
    if (!reached.ok()) {
      const absl::string_view name = context_.parameter(queue_.At(finished_).parameter).name;
      context_.FailSlot(slot_, Annotate(reached.status(), absl::StrFormat("parameter '%s'", name)));
    }
  }
  if (finished_ != before) queue_.Finish(slot_, finished_);
}

}  // namespace dmuon::server
