// Stage 1, from the owner's side, where slots read each other's memory: the mean over ranks of each owned parameter's gradient,
// summed over micros.
#ifndef DMUON_SERVER_STEP_REDUCE_H_
#define DMUON_SERVER_STEP_REDUCE_H_

#include <cstdint>
#include <vector>

#include "kernels/ops/backend.h"
#include "server/step/context.h"

namespace dmuon::server {

// Touched by its worker alone. Reads the mapped GRAD arenas of all slots in rank order.
class Reducer {
 public:
  Reducer(StepContext& context, SlotId slot, kernels::Stream stream);

  // Reads every micro of `generation` that all ranks have sent, as soon as they have; a rank that has closed the
  // generation has sent all it will. What was left of earlier generations is dropped, and may be written over. Never waits.
  void ReduceReady(uint64_t generation);
  // All ranks have sent STEP: enqueues what is left. A rank that did not send a micro counts as zeros.
  void ReduceRest(uint64_t generation);
  // Tells the trainers what the device has read meanwhile: they may write it over. Never waits.
  void Settle();
  // Whether the device is still reading something.
  bool Reading() const { return !unread_.empty(); }

  // Whether any micro of the boundary came in `generation`.
  bool Has(BoundaryId boundary, uint64_t generation) const;

 private:
  struct Progress {
    uint64_t generation = 0;
    uint32_t micros = 0;  // read so far in that generation
  };
  void DropBefore(uint64_t generation);
  // A micro that was enqueued: when the device passes `mark`, all of it was read.
  struct Unread {
    BoundaryId boundary;
    uint64_t consumed = 0;
    uint64_t mark = 0;
  };
  Progress& At(BoundaryId boundary, uint64_t generation);
  void ReadMicro(BoundaryId boundary, Progress& progress);
  void MarkConsumed(BoundaryId boundary, uint64_t mark);

  StepContext& context_;
  const SlotId slot_;
  const kernels::Stream stream_;
  std::vector<BoundaryId> boundaries_;           // in which this slot owns something
  std::vector<std::vector<ParameterId>> owned_;  // by boundary
  std::vector<Progress> progress_;               // by boundary
  std::vector<const void*> inputs_;
  std::vector<Unread> unread_;  // in the order of the stream; reserved
  uint64_t generation_ = 1;     // what is before it has been dropped
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_REDUCE_H_
