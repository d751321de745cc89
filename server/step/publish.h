// Stage 4: new weights into the trainers' WEIGHT arenas, in the dtype that they compute in. What reads another slot's memory
// here is for slots whose devices can.
#ifndef DMUON_SERVER_STEP_PUBLISH_H_
#define DMUON_SERVER_STEP_PUBLISH_H_

#include <vector>

#include "kernels/ops/backend.h"
#include "server/step/context.h"
#include "server/step/record_table.h"

namespace dmuon::server {

// Enqueues, on the stream of `by`, the master of `parameter` into the arena of `slot`.
void WriteInto(StepContext& context, SlotId by, kernels::Stream stream, ParameterId parameter,
               SlotId slot);

// Z2: enqueues, on the owner's stream, the owner's master of `parameter` into every slot's arena. Z3 has nothing to
// write: windows are filled when they are asked for; nor is there anything to write to before the trainers have
// registered.
void WriteWeight(StepContext& context, kernels::Stream stream, ParameterId parameter);

// The owner's state of `parameter` is at `step`, and written where it belongs. When it is the boundary's last one, every
// trainer is told, and when it is the step's last one, that too.
void MarkPublished(StepContext& context, ParameterId parameter, uint64_t step);

// Whether the owners' state of all of them has reached `step`.
bool AllCommitted(const StepContext& context, const std::vector<ParameterId>& parameters,
                  uint64_t step);

// The window is filled: its trainer is told.
void GrantWindow(StepContext& context, SlotId slot, const Materialization& filled);

// Z3: fills the windows that `slot`'s trainer asked for and whose weights have reached `step`, and grants those that the
// device has filled; keeps the others.
void FillWindows(StepContext& context, SlotId slot, kernels::Stream stream, uint64_t step,
                 std::vector<Materialization>& wanted);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_PUBLISH_H_
