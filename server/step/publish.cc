#include "server/step/publish.h"

#include <algorithm>

#include "base/status_macros.h"

namespace dmuon::server {

void WriteInto(StepContext& context, SlotId by, kernels::Stream stream, ParameterId p,
               SlotId slot) {
  if (!context.Reachable(slot)) return;
  const Dtype dtype = context.optimizer.parameters[p.index()].param_dtype;
  std::byte* to =
      context.arenas[slot.index()].weight.data() + context.layout.weight_offset[p.index()];
  const Region held = HeldBy(context.parameter(p), context.mesh, slot);
  context.backend(by).Publish(stream, context.state[p.index()].weight + held.begin, dtype, to,
                              held.size());
}

bool AllCommitted(const StepContext& context, const std::vector<ParameterId>& parameters,
                  uint64_t step) {
  return std::all_of(parameters.begin(), parameters.end(), [&](ParameterId p) {
    return context.version[p.index()].load(std::memory_order_seq_cst) >= step;
  });
}

void GrantWindow(StepContext& context, SlotId slot, const Materialization& filled) {
  const wire::ControlPage& page = context.page(slot);
  page.boundary(filled.boundary.value())
      .window_grant.store(filled.ticket, std::memory_order_release);
  page.RingTrainer();
}

void WriteWeight(StepContext& context, kernels::Stream stream, ParameterId parameter) {
  if (context.z3) return;
  const SlotId owner = context.plan.transfers[parameter.index()].owner;
  for (int s = 0; s < context.slots(); ++s) WriteInto(context, owner, stream, parameter, SlotId(s));
}

void MarkPublished(StepContext& context, ParameterId parameter, uint64_t step) {
  context.version[parameter.index()].store(step, std::memory_order_seq_cst);
  const BoundaryId b = context.parameter(parameter).boundary;
  if (!AllCommitted(context, context.plan.parameters[b.index()], step)) return;
  const bool all = std::all_of(context.plan.parameters.begin(), context.plan.parameters.end(),
                               [&](const auto& of) { return AllCommitted(context, of, step); });
  for (int s = 0; s < context.slots(); ++s) {
    const wire::ControlPage& page = context.page(SlotId(s));
    page.boundary(b.value()).weights_version.store(step, std::memory_order_release);
    if (all) page.header().done_step.store(step, std::memory_order_release);
    page.RingTrainer();
    if (context.z3) page.RingDaemon();  // a window may wait for this version
  }
}

void FillWindows(StepContext& context, SlotId slot, kernels::Stream stream, uint64_t step,
                 std::vector<Materialization>& wanted) {
  kernels::Backend& backend = context.backend(slot);
  const auto filled = [&](Materialization& m) {
    if (!m.mark.has_value()) {
      const std::vector<ParameterId>& parameters = context.plan.parameters[m.boundary.index()];
      if (!AllCommitted(context, parameters, step)) return false;
      // One-sided: the owners cannot move on before this slot has sent its next STEP, and this worker is here.
      for (ParameterId p : parameters) WriteInto(context, slot, stream, p, slot);
      m.mark = backend.Mark(stream);
    }
    const absl::StatusOr<bool> reached = backend.Reached(stream, *m.mark);
    if (!reached.ok()) {
      context.FailSlot(slot, Annotate(reached.status(), "filling a window"));
      return true;
    }
    if (!*reached) return false;
    GrantWindow(context, slot, m);
    return true;
  };
  wanted.erase(std::remove_if(wanted.begin(), wanted.end(), filled), wanted.end());
}

}  // namespace dmuon::server
