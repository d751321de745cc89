// One numbered update of the session, from one slot's side. step.cc is the walk of a gradient through the daemon.
//
// Each stage takes what the stage before it returns, so that a stage that is left out or repeated does not compile.
#ifndef DMUON_SERVER_STEP_STEP_H_
#define DMUON_SERVER_STEP_STEP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops/backend.h"
#include "server/step/context.h"
#include "server/step/progress.h"
#include "server/step/verdict.h"

namespace dmuon::server {

class Step {
 public:
  // `updates`: of the parameters that `slot` owns, in the order of the plan. Their sums lie one behind the other.
  Step(StepContext& context, SlotId slot, kernels::Stream stream, Progress& progress,
       std::vector<PlannedUpdate> updates);

  // Answers the STEP record that waits in the record table, and does what it asks for.
  void Run();

 private:
  // Every rank's STEP is here; what they said, by rank.
  struct Arrived {
    std::vector<absl::Span<const std::byte>>& messages;
  };
  // The mean of every owned gradient is in private memory; or why it is not, which this slot is about to tell the others.
  struct Reduced {
    absl::Status status;
    uint64_t digest = 0;  // of what brought it there
  };
  // The same on all slots.
  struct Judged {
    bool finite = true;
    double total_norm = 0;
    double max_norm = 0;
  };
  struct Clipped {
    Judged judged;
    double coefficient = 1;
  };
  // O of one parameter is in the workspace.
  struct Updated {
    size_t owned;  // index into the owned parameters
    bool changed;  // false: no rank had a gradient
  };
  struct Committed {
    size_t owned;
    bool changed;
  };

  // The STEP that came is not the next one: answers it without a step. True when it did.
  bool AnswerOutOfOrder(const wire::Record& record);
  absl::StatusOr<Arrived> Gather(const wire::Record& record);
  absl::StatusOr<Reduced> Reduce(const Arrived& arrived);
  absl::StatusOr<Judged> Judge(const Reduced& reduced);
  bool MomentumHolds(const Judged& judged) const;
  Clipped Clip(const Judged& judged);
  void Answer(const Clipped& clipped);
  Updated ComputeUpdate(size_t owned, const Clipped& clipped);
  Committed Commit(const Updated& updated, const Clipped& clipped);
  void Publish(const Committed& committed);

  absl::StatusOr<Reduced> AwaitFetched();
  absl::Status FetchPieceSums();
  void AnnouncePublished(size_t enqueued);
  void FetchSums();
  void FinishPublishing();
  void Measure(const Clipped& clipped);
  void AnswerFailure(const wire::Record& record, const absl::Status& why);
  void WriteVerdict(uint32_t flags, uint64_t next_generation, const absl::Status& status);
  absl::Status WaitForRound(absl::Time deadline);
  absl::Status AbortCause(absl::Time deadline) const;
  UpdateInputs InputsOf(size_t owned, const Clipped& clipped) const;

  StepContext& context_;
  const SlotId slot_;
  const kernels::Stream stream_;
  Progress& progress_;
  const std::vector<ParameterId>& owned_;
  const std::vector<PlannedUpdate> updates_;

  // Scratch of the step under way; reserved once.
  Messages messages_;
  std::vector<absl::Span<const std::byte>> gathered_;
  std::vector<wire::GroupHyper> hyper_;
  std::vector<bool> present_;          // by owned parameter: some rank had a gradient
  std::vector<double> piece_sums_;     // by owned parameter, of each piece
  std::vector<double> square_sums_;    // by owned parameter
  std::vector<Sent> sent_;             // by owned parameter: its publication
  size_t published_ = 0;               // owned parameters that the trainers were told of
  std::vector<double> sums_;           // of the updates, one behind the other
  uint64_t sums_fetched_ = 0;          // the mark behind their copy
  std::vector<BlockMeasures> blocks_;  // of all owned parameters
  std::vector<double> norms_squared_;  // by parameter, of all slots
  uint64_t generation_ = 0;
  uint64_t latest_generation_ = 0;  // of all ranks
  uint64_t answered_ = 0;           // STEP records of this trainer that were answered
  uint32_t last_flags_ = 0;         // of the last committed step, for a STEP that comes twice
  SlotStep report_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_STEP_H_
