#include "server/step/step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "server/clip/clip.h"
#include "server/step/publish.h"

namespace dmuon::server {
namespace {

double Since(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

size_t PieceCount(const StepContext& context, SlotId slot) {
  size_t pieces = 0;
  for (ParameterId p : context.plan.owned[slot.index()]) {
    pieces += context.plan.transfers[p.index()].pieces.size();
  }
  return pieces;
}

std::string RankList(const std::vector<SlotId>& slots) {
  return absl::StrJoin(slots, ", ",
                       [](std::string* out, SlotId s) { absl::StrAppend(out, s.value()); });
}

}  // namespace

// The walk. A trainer's gradients are in its GRAD arena, and its STEP record is here.
void Step::Run() {
  const wire::Record record = *progress_.records().step();
  if (AnswerOutOfOrder(record)) return;

  const absl::StatusOr<Arrived> arrived = Gather(record);
  if (!arrived.ok()) return AnswerFailure(record, arrived.status());
  const absl::Time start = absl::Now();

  const absl::StatusOr<Reduced> reduced = Reduce(*arrived);  // 1 reduce
  if (!reduced.ok()) return AnswerFailure(record, reduced.status());
  const absl::StatusOr<Judged> judged = Judge(*reduced);  //   the verdict: all slots agree
  if (!judged.ok()) return AnswerFailure(record, judged.status());

  const Clipped clipped = Clip(*judged);  // 2 clip: a coefficient for the gradients
  Answer(clipped);  //   the trainer goes on; what follows is finished whatever becomes of it
  for (size_t i = 0; i < owned_.size(); ++i) {
    const Updated updated = ComputeUpdate(i, clipped);  // 3 update: momentum, Newton-Schulz
    const Committed committed =
        Commit(updated, clipped);  //   commit: this parameter flips to the new version
    Publish(committed);            // 4 publish: into every trainer's WEIGHT arena
    progress_.Drain();             //   nobody waits for this slot meanwhile
  }
  FinishPublishing();  //   devices may still be at it
  Measure(clipped);    // what each block did, for the step's record

  report_.total = Since(start);
  context_.log->Add(report_, slot_, blocks_);
}

Step::Step(StepContext& context, SlotId slot, kernels::Stream stream, Progress& progress,
           std::vector<PlannedUpdate> updates)
    : context_(context),
      slot_(slot),
      stream_(stream),
      progress_(progress),
      owned_(context.plan.owned[slot.index()]),
      updates_(std::move(updates)),
      messages_(context),
      gathered_(context.slots()),
      hyper_(context.optimizer.groups.size()),
      present_(owned_.size(), false),
      piece_sums_(PieceCount(context, slot), 0),
      square_sums_(owned_.size(), 0),
      sent_(owned_.size()),
      norms_squared_(context.table.parameters.size(), 0) {
  size_t sums = 0, blocks = 0;
  for (size_t i = 0; i < owned_.size(); ++i) {
    sums += SumsOf(context.parameter(owned_[i]));
    blocks += updates_[i].update->blocks().size();
  }
  sums_.resize(sums);
  blocks_.resize(blocks);
}

bool Step::AnswerOutOfOrder(const wire::Record& record) {
  const uint64_t committed = progress_.step();
  if (record.step == committed + 1 && record.generation >= context_.floor_generation.load())
    return false;
  report_ = {.step = record.step};
  absl::Status status;
  uint64_t next = record.generation;
  if (record.step == committed && committed > 0) {
    // The same STEP again: the same answer, and no second update.
  } else if (record.step != committed + 1) {
    status = absl::FailedPreconditionError(
        absl::StrFormat("step id: expected %d, got %d", committed + 1, record.step));
  } else {
    next = context_.floor_generation.load();
    status = absl::AbortedError(absl::StrFormat(
        "step %d was given up before this rank came; its gradients are dropped, run the backward "
        "again and step: %s",
        record.step, context_.given_up().message()));
  }
  WriteVerdict(status.ok() ? last_flags_ : 0, next, status);
  return true;
}

// First round: every rank's STEP.
absl::StatusOr<Step::Arrived> Step::Gather(const wire::Record& record) {
  report_ = {.step = record.step};
  std::fill(blocks_.begin(), blocks_.end(), BlockMeasures{});
  generation_ = record.generation;
  latest_generation_ = record.generation;
  context_.communicator->Post(slot_, messages_.Arrive(record, context_.page(slot_), hyper_));
  RETURN_IF_ERROR(WaitForRound(absl::Now() + context_.step_timeout));

  int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
  for (int s = 0; s < context_.slots(); ++s) {
    gathered_[s] = context_.communicator->Message(slot_, SlotId(s));
    const Arrival& arrival = Messages::ArrivalOf(gathered_[s]);
    first = std::min(first, arrival.unix_nanos);
    last = std::max(last, arrival.unix_nanos);
    latest_generation_ = std::max(latest_generation_, arrival.generation);
  }
  report_.wait = static_cast<double>(last - first) * 1e-9;
  RETURN_IF_ERROR(CheckArrivals(context_, messages_, gathered_));
  RETURN_IF_ERROR(
      CheckHyper(context_, record.step, hyper_));  // the same on all ranks, so is the answer
  return Arrived{gathered_};
}

// Whatever of this generation has not been read yet, and which parameters had a gradient anywhere.
absl::StatusOr<Step::Reduced> Step::Reduce(const Arrived& arrived) {
  const absl::Time start = absl::Now();
  progress_.courier().FetchRest(generation_);
  ASSIGN_OR_RETURN(const Reduced reduced, AwaitFetched());
  RETURN_IF_ERROR(FetchPieceSums());
  progress_.courier().Settle();
  report_.reduce += Since(start);
  const double* sum = piece_sums_.data();
  for (size_t i = 0; i < owned_.size(); ++i) {
    const ParameterId p = owned_[i];
    present_[i] = progress_.courier().Has(context_.parameter(p).boundary, generation_) &&
                  std::any_of(arrived.messages.begin(), arrived.messages.end(),
                              [&](const auto& message) { return messages_.Present(message, p); });
    const size_t pieces = context_.plan.transfers[p.index()].pieces.size();
    square_sums_[i] = present_[i] ? std::accumulate(sum, sum + pieces, 0.0) : 0;
    sum += pieces;
  }
  return reduced;
}

// Where owners read the others' memory, everything is on the stream by now.
absl::StatusOr<Step::Reduced> Step::AwaitFetched() {
  absl::Status status;
  const auto over = [&] {
    const absl::StatusOr<bool> fetched = progress_.courier().Fetched();
    status = fetched.status();
    return !fetched.ok() || *fetched;
  };
  if (!over() && !progress_.Until(over, absl::InfiniteFuture()))
    return absl::CancelledError("the session has ended");
  return Reduced{status, progress_.courier().digest()};
}

// The one wait of a step: what the reduction has enqueued is over, and the host knows its norms.
absl::Status Step::FetchPieceSums() {
  kernels::Backend& backend = context_.backend(slot_);
  if (!piece_sums_.empty()) {
    backend.CopyToHost(stream_, piece_sums_.data(),
                       context_.state[owned_.front().index()].square_sum,
                       piece_sums_.size() * sizeof(double));
  }
  const absl::Status status =
      Annotate(backend.Synchronize(stream_), absl::StrFormat("step %d: reduce", report_.step));
  if (!status.ok()) context_.FailSlot(slot_, status);
  return status;
}

// Second round: every slot's norms. The sum runs in the order of the table, so that it does not depend on placement.
absl::StatusOr<Step::Judged> Step::Judge(const Reduced& reduced) {
  const absl::Time start = absl::Now();
  // Read before the second round takes the messages' place.
  Judged judged;
  judged.max_norm = Messages::ArrivalOf(gathered_[slot_.index()]).max_norm;
  for (const auto& message : gathered_) {
    if (Messages::ArrivalOf(message).flags & wire::kFoundInf) judged.finite = false;
  }
  context_.communicator->Post(slot_,
                              messages_.Reduce(reduced.status, reduced.digest, square_sums_));
  RETURN_IF_ERROR(WaitForRound(absl::InfiniteFuture()));
  for (int s = 0; s < context_.slots(); ++s)
    gathered_[s] = context_.communicator->Message(slot_, SlotId(s));
  RETURN_IF_ERROR(CheckReductions(report_.step, gathered_));

  for (int s = 0; s < context_.slots(); ++s) {
    const absl::Span<const double> sums = Messages::NormsOf(gathered_[s]);
    const std::vector<ParameterId>& owned = context_.plan.owned[s];
    for (size_t i = 0; i < owned.size(); ++i) norms_squared_[owned[i].index()] = sums[i];
  }
  double total = 0;
  for (size_t p = 0; p < norms_squared_.size(); ++p) {
    if (!std::isfinite(norms_squared_[p])) judged.finite = false;
    if (context_.table.parameters[p].route == Route::kMuon) total += norms_squared_[p];
  }
  judged.total_norm = std::sqrt(total);
  if (!MomentumHolds(judged)) judged.finite = false;
  report_.verdict = Since(start);
  if (!judged.finite && context_.optimizer.nonfinite == Nonfinite::kError) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "step %d: a gradient is not finite, or too large for momentum in fp32, and the policy for "
        "that is 'error'; nothing was changed",
        report_.step));
  }
  if (context_.optimizer.nonfinite == Nonfinite::kApply) judged.finite = true;
  return judged;
}

// Whether every muon parameter's momentum stays finite with these gradients: finite ones of 1e38 would make it NaN for good.
bool Step::MomentumHolds(const Judged& judged) const {
  const double clip = ClipCoefficient(judged.total_norm, judged.max_norm);
  for (size_t p = 0; p < norms_squared_.size(); ++p) {
    if (context_.table.parameters[p].route != Route::kMuon) continue;
    const double momentum = hyper_[context_.optimizer.parameters[p].group].momentum;
    if (clip * std::sqrt(norms_squared_[p]) > LargestGradient(momentum)) return false;
  }
  return true;
}

Step::Clipped Step::Clip(const Judged& judged) {
  return {judged, ClipCoefficient(judged.total_norm, judged.max_norm)};
}

void Step::Answer(const Clipped& clipped) {
  report_.applied = clipped.judged.finite;
  report_.total_norm = clipped.judged.total_norm;
  report_.clip_coefficient = clipped.coefficient;
  last_flags_ = clipped.judged.finite ? wire::kApplied : wire::kSkippedNonfinite;
  if (clipped.coefficient < 1) last_flags_ |= wire::kClipped;
  const absl::Span<double> norms = context_.page(slot_).norms();
  for (size_t p = 0; p < norms.size(); ++p) norms[p] = std::sqrt(norms_squared_[p]);
  progress_.SetStep(report_.step);
  uint64_t seen = context_.answered_step.load();
  while (seen < report_.step && !context_.answered_step.compare_exchange_weak(seen, report_.step)) {
  }
  WriteVerdict(last_flags_, latest_generation_ + 1, absl::OkStatus());
}

UpdateInputs Step::InputsOf(size_t owned, const Clipped& clipped) const {
  const ParameterId p = owned_[owned];
  const bool muon = context_.parameter(p).route == Route::kMuon;
  return {hyper_[context_.optimizer.parameters[p.index()].group], muon ? clipped.coefficient : 1};
}

Step::Updated Step::ComputeUpdate(size_t owned, const Clipped& clipped) {
  const bool changed = clipped.judged.finite && present_[owned];
  if (!changed) return {owned, false};
  const absl::Time start = absl::Now();
  const PlannedUpdate& planned = updates_[owned];
  planned.update->Compute(stream_, InputsOf(owned, clipped), planned.place);
  report_.newton_schulz_calls += static_cast<int>(planned.update->blocks().size());
  report_.update += Since(start);
  return {owned, true};
}

Step::Committed Step::Commit(const Updated& updated, const Clipped& clipped) {
  if (!updated.changed) return {updated.owned, false};
  const absl::Time start = absl::Now();
  const PlannedUpdate& planned = updates_[updated.owned];
  planned.update->Commit(stream_, InputsOf(updated.owned, clipped), planned.place);
  report_.update += Since(start);
  return {updated.owned, true};
}

void Step::Publish(const Committed& committed) {
  const absl::Time start = absl::Now();
  if (committed.owned == 0) published_ = 0;
  if (committed.owned + 1 == owned_.size()) FetchSums();
  sent_[committed.owned] = progress_.courier().Publish(owned_[committed.owned], committed.changed);
  AnnouncePublished(committed.owned + 1);
  report_.publish += Since(start);
}

// Of the first `enqueued` parameters, those that have arrived since the last look.
void Step::AnnouncePublished(size_t enqueued) {
  for (; published_ < enqueued; ++published_) {
    const ParameterId p = owned_[published_];
    const absl::StatusOr<bool> arrived = progress_.courier().Arrived(sent_[published_]);
    if (!arrived.ok()) {
      context_.FailSlot(
          slot_, Annotate(arrived.status(), absl::StrFormat("step %d, parameter '%s'", report_.step,
                                                            context_.parameter(p).name)));
      continue;
    }
    if (!*arrived) return;
    MarkPublished(context_, p, report_.step);
  }
}

// One copy for all updates, behind the last commit and before the last weight, which trainers wait for.
void Step::FetchSums() {
  if (sums_.empty()) return;
  kernels::Backend& backend = context_.backend(slot_);
  backend.CopyToHost(stream_, sums_.data(), updates_.front().place.sums,
                     sums_.size() * sizeof(double));
  sums_fetched_ = backend.Mark(stream_);
}

void Step::FinishPublishing() {
  const absl::Time start = absl::Now();
  progress_.DrainUntil([this] {
    AnnouncePublished(owned_.size());
    if (!owned_.empty() && published_ < owned_.size()) return false;
    if (sums_.empty()) return true;
    const absl::StatusOr<bool> fetched = context_.backend(slot_).Reached(stream_, sums_fetched_);
    return !fetched.ok() || *fetched;  // publishing has found the failure
  });
  report_.publish += Since(start);
}

void Step::Measure(const Clipped& clipped) {
  absl::Span<const double> sums = sums_;
  absl::Span<BlockMeasures> blocks = absl::MakeSpan(blocks_);
  for (size_t i = 0; i < owned_.size(); ++i) {
    const Update& update = *updates_[i].update;
    const size_t count = SumsOf(context_.parameter(owned_[i]));
    if (clipped.judged.finite && present_[i])
      update.Measures(sums.first(count), blocks.first(update.blocks().size()));
    sums.remove_prefix(count);
    blocks.remove_prefix(update.blocks().size());
  }
}

void Step::AnswerFailure(const wire::Record& record, const absl::Status& why) {
  const uint64_t next = std::max(latest_generation_, record.generation) + 1;
  context_.GiveUp(next, why);
  report_.status = why;
  context_.log->Add(report_, slot_, {});
  WriteVerdict(0, next, why);
}

void Step::WriteVerdict(uint32_t flags, uint64_t next_generation, const absl::Status& status) {
  progress_.records().EndStep(next_generation);
  const wire::ControlPage& page = context_.page(slot_);
  wire::Verdict& verdict = page.header().verdict;
  verdict.step = report_.step;
  verdict.next_generation = next_generation;
  verdict.code = static_cast<uint32_t>(status.code());
  verdict.flags = flags;
  verdict.total_norm = report_.total_norm;
  verdict.clip_coefficient = report_.clip_coefficient;
  WriteText(std::string(status.message()), verdict.reason, sizeof(verdict.reason));
  verdict.answered.store(++answered_, std::memory_order_release);
  page.RingTrainer();
}

// Until all slots have posted. A rank that cannot come any more, or that does not come in time, ends the round for all.
absl::Status Step::WaitForRound(absl::Time deadline) {
  Communicator& communicator = *context_.communicator;
  context_.RingWorkers();
  const auto over = [&] {
    if (communicator.State(slot_) != RoundState::kOpen) return true;
    const absl::Status cause = AbortCause(deadline);
    if (!cause.ok()) {
      communicator.Abort(slot_, cause);
      context_.RingWorkers();
    }
    return communicator.State(slot_) != RoundState::kOpen;
  };
  if (!progress_.Until(over, absl::InfiniteFuture()))
    return absl::CancelledError("the session has ended");
  if (communicator.State(slot_) == RoundState::kAborted) return communicator.Cause(slot_);
  return absl::OkStatus();
}

absl::Status Step::AbortCause(absl::Time deadline) const {
  Communicator& communicator = *context_.communicator;
  for (int s = 0; s < context_.slots(); ++s) {
    if (communicator.Gone(SlotId(s)).ok()) continue;
    // Gone, but what it had sent counts.
    const std::vector<SlotId> missing = communicator.Missing(slot_);
    if (std::find(missing.begin(), missing.end(), SlotId(s)) == missing.end()) continue;
    return absl::AbortedError(
        absl::StrFormat("step %d: %s", report_.step, communicator.Gone(SlotId(s)).message()));
  }
  if (absl::Now() >= deadline) {
    return absl::DeadlineExceededError(absl::StrFormat(
        "step %d: rank(s) %s did not come within %s", report_.step,
        RankList(communicator.Missing(slot_)), absl::FormatDuration(context_.step_timeout)));
  }
  return absl::OkStatus();
}

}  // namespace dmuon::server
