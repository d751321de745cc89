// What a trainer has said through its ring, checked and in order: the slot's side of the protocol.
//
// Touched by its worker alone. A record that breaks the protocol is an error that ends the session: the trainer is
// authenticated, not trusted, and what it would have meant is not guessed.
#ifndef DMUON_SERVER_STEP_RECORD_TABLE_H_
#define DMUON_SERVER_STEP_RECORD_TABLE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "proto/wire/control_page.h"
#include "server/parameter/parameter.h"
#include "server/step/context.h"

namespace dmuon::server {

// A weight window to fill (Z3).
struct Materialization {
  BoundaryId boundary;
  uint64_t ticket = 0;
  std::optional<uint64_t> mark;  // once it is enqueued: the backend's, behind it
  uint64_t position = 0;         // and behind its exchanges, where there are any
};

class RecordTable {
 public:
  RecordTable(StepContext& context, SlotId slot);

  // Moves all unread records from the ring into the table, and announces the gradients that became readable.
  // INVALID_ARGUMENT or FAILED_PRECONDITION: the record, its field, the expected and the given.
  absl::Status Drain();

  uint64_t generation() const { return generation_; }
  // The STEP record that waits for its verdict.
  const std::optional<wire::Record>& step() const { return step_; }
  // The STEP was answered; `next_generation` begins.
  void EndStep(uint64_t next_generation);

  std::vector<Materialization>& materializations() { return materializations_; }
  const std::vector<Materialization>& materializations() const { return materializations_; }

 private:
  absl::Status Accept(const wire::Record& record);
  absl::Status CheckCommon(const wire::Record& record) const;
  void CloseGeneration(uint64_t generation);
  absl::Status GradsReady(const wire::Record& record);
  absl::Status Step(const wire::Record& record);
  absl::Status Discard(const wire::Record& record);
  absl::Status Materialize(const wire::Record& record);
  absl::Status Release(const wire::Record& record);

  StepContext& context_;
  const SlotId slot_;
  uint64_t generation_ = 1;
  std::vector<uint32_t> micros_;  // by boundary: micros that came in this generation
  std::optional<wire::Record> step_;
  std::vector<Materialization> materializations_;
  std::vector<int> window_holder_;  // by window: the boundary that holds it, -1 = none (Z3)
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_RECORD_TABLE_H_
