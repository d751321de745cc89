#include "server/step/record_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

constexpr uint32_t kMaxMicros = 0xfffe;  // a mark has 16 bits for micro + 1

// A field that a type does not use is zero: what it says there is for a later version of the page.
absl::Status CheckUnused(const wire::Record& r) {
  const bool ready = r.type == wire::RecordType::kGradsReady;
  const bool step = r.type == wire::RecordType::kStep;
  const bool materialize = r.type == wire::RecordType::kMaterialize;
  const bool release = r.type == wire::RecordType::kRelease;
  const std::pair<const char*, bool> fields[] = {
      {"boundary", ready || materialize || release || r.boundary == 0},
      {"step", step || r.step == 0},
      {"micro", ready || step || r.micro == 0},
      {"flags", step || r.flags == 0},
      {"max_norm", step || r.max_norm == 0},
      {"ticket", materialize || r.ticket == 0}};
  for (const auto& [field, good] : fields) {
    if (!good)
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": expected 0 in a record that does not use it"));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Mismatch(const char* field, T expected, T given) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: expected %d, got %d", field, expected, given));
}

}  // namespace

RecordTable::RecordTable(StepContext& context, SlotId slot)
    : context_(context), slot_(slot), micros_(context.table.boundaries.size(), 0) {
  int windows = 0;
  for (int w : context.layout.window) windows = std::max(windows, w + 1);
  window_holder_.assign(windows, -1);
  materializations_.reserve(context.table.boundaries.size());
}

absl::Status RecordTable::Drain() {
  for (;;) {
    const absl::StatusOr<std::optional<wire::Record>> popped = context_.page(slot_).Pop();
    if (!popped.ok()) return Annotate(popped.status(), absl::StrFormat("rank %d", slot_.value()));
    const std::optional<wire::Record>& record = *popped;
    if (!record.has_value()) return absl::OkStatus();
    const absl::Status accepted = Accept(*record);
    if (!accepted.ok()) {
      return Annotate(accepted, absl::StrFormat("rank %d, ring record of type %d", slot_.value(),
                                                static_cast<uint32_t>(record->type)));
    }
  }
}

absl::Status RecordTable::CheckCommon(const wire::Record& record) const {
  if (record.table_digest != context_.table_digest) {
    return absl::InvalidArgumentError(absl::StrFormat("table digest: expected %016x, got %016x",
                                                      context_.table_digest, record.table_digest));
  }
  if (record.epoch != StepContext::kEpoch) {
    return Mismatch("epoch", StepContext::kEpoch, record.epoch);
  }
  return absl::OkStatus();
}

absl::Status RecordTable::Accept(const wire::Record& record) {
  RETURN_IF_ERROR(CheckCommon(record));
  RETURN_IF_ERROR(CheckUnused(record));
  switch (record.type) {
    case wire::RecordType::kGradsReady: return GradsReady(record);
    case wire::RecordType::kStep: return Step(record);
    case wire::RecordType::kDiscard: return Discard(record);
    case wire::RecordType::kMaterialize: return Materialize(record);
    case wire::RecordType::kRelease: return Release(record);
    case wire::RecordType::kPrepare: return absl::UnimplementedError("PREPARE is not built yet");
    case wire::RecordType::kUnspecified: break;
  }
  return absl::InvalidArgumentError("type: not one of the known records");
}

absl::Status RecordTable::GradsReady(const wire::Record& record) {
  if (record.boundary >= micros_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "boundary: expected an index below %d, got %d", micros_.size(), record.boundary));
  }
  if (step_.has_value()) return absl::FailedPreconditionError("gradients behind an open STEP");
  if (record.generation != generation_) {
    return Mismatch("generation", generation_, record.generation);
  }
  uint32_t& micros = micros_[record.boundary];
  if (record.micro != micros || record.micro >= kMaxMicros) {
    return Mismatch("micro", micros, record.micro);
  }
  ++micros;
  context_.communicator->Announce(slot_, BoundaryId(static_cast<int32_t>(record.boundary)),
                                  wire::ConsumedMark(generation_, record.micro));
  context_.RingWorkers();
  return absl::OkStatus();
}

absl::Status RecordTable::Step(const wire::Record& record) {
  if (step_.has_value()) return absl::FailedPreconditionError("a second STEP before the verdict");
  if (record.generation != generation_) {
    return Mismatch("generation", generation_, record.generation);
  }
  if (!(record.max_norm >= 0) || std::isinf(record.max_norm)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_norm: expected a finite number of at least 0, got %g", record.max_norm));
  }
  if ((record.flags & ~uint32_t{wire::kFoundInf}) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("flags: expected none but %#x, got %#x", wire::kFoundInf, record.flags));
  }
  step_ = record;
  CloseGeneration(generation_);
  return absl::OkStatus();
}

// Owners that wait for more micros of this slot wait no longer. A STEP wakes them by its own round.
void RecordTable::CloseGeneration(uint64_t generation) {
  const uint64_t before = context_.closed_generation[slot_.index()].exchange(generation);
  if (before != generation && !step_.has_value()) context_.RingWorkers();
}

absl::Status RecordTable::Discard(const wire::Record& record) {
  if (step_.has_value()) return absl::FailedPreconditionError("DISCARD behind an open STEP");
  if (record.generation != generation_) {
    return Mismatch("generation", generation_, record.generation);
  }
  CloseGeneration(generation_);
  ++generation_;
  std::fill(micros_.begin(), micros_.end(), 0);
  return absl::OkStatus();
}

void RecordTable::EndStep(uint64_t next_generation) {
  step_.reset();
  if (next_generation == generation_) return;  // a STEP that was refused changes nothing
  CloseGeneration(next_generation - 1);
  generation_ = next_generation;
  std::fill(micros_.begin(), micros_.end(), 0);
}

absl::Status RecordTable::Materialize(const wire::Record& record) {
  if (!context_.z3)
    return absl::FailedPreconditionError("MATERIALIZE in a session without windows");
  if (record.boundary >= micros_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "boundary: expected an index below %d, got %d", micros_.size(), record.boundary));
  }
  const int boundary = static_cast<int>(record.boundary);
  int& holder = window_holder_[context_.layout.window[boundary]];
  if (holder >= 0 && holder != boundary) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "boundary '%s': its window is held by '%s'", context_.table.boundaries[boundary].name,
        context_.table.boundaries[holder].name));
  }
  holder = boundary;
  if (materializations_.size() == micros_.size()) {
    return absl::FailedPreconditionError("more MATERIALIZE records open than there are boundaries");
  }
  materializations_.push_back({BoundaryId(boundary), record.ticket});
  return absl::OkStatus();
}

absl::Status RecordTable::Release(const wire::Record& record) {
  if (!context_.z3) return absl::FailedPreconditionError("RELEASE in a session without windows");
  if (record.boundary >= micros_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "boundary: expected an index below %d, got %d", micros_.size(), record.boundary));
  }
  int& holder = window_holder_[context_.layout.window[record.boundary]];
  if (holder == static_cast<int>(record.boundary)) holder = -1;
  return absl::OkStatus();
}

}  // namespace dmuon::server
