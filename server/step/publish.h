// Stage 4: new weights into the trainers' WEIGHT arenas, in the dtype that they compute in.
#ifndef DMUON_SERVER_STEP_PUBLISH_H_
#define DMUON_SERVER_STEP_PUBLISH_H_

#include <vector>

#include "kernels/ops/backend.h"
#include "server/step/context.h"
#include "server/step/record_table.h"

namespace dmuon::server {

// Z2: enqueues, on the owner's stream, the owner's master of `parameter` into every slot's arena. Z3 has nothing to
// write: windows are filled when they are asked for; nor is there anything to write to before the trainers have
// registered.
void WriteWeight(StepContext& context, kernels::Stream stream, ParameterId parameter);

// The owner's state of `parameter` is at `step`, and written where it belongs. When it is the boundary's last one, every
// trainer is told, and when it is the step's last one, that too.
void MarkPublished(StepContext& context, ParameterId parameter, uint64_t step);

// Z3: fills the windows that `slot`'s trainer asked for and whose weights have reached `step`, and grants those that the
// device has filled; keeps the others.
void FillWindows(StepContext& context, SlotId slot, kernels::Stream stream, uint64_t step,
                 std::vector<Materialization>& wanted);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_PUBLISH_H_
