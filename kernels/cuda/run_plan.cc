#include "kernels/cuda/run_plan.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/checked_math.h"
#include "base/status_macros.h"
#include "kernels/newton_schulz/coefficients.h"
#include "kernels/newton_schulz/form.h"
#include "kernels/newton_schulz/restarts.h"

namespace dmuon::cuda {
namespace {

using kernels::NsForm;

constexpr size_t kAlign = 256;

// In fp16 one restart holds every spectrum, but leaves 2.6e-3 on Gaussian matrices of 512 x 1024 (1.3e-3 at 1024 x 2048,
// docs/numerics.md asks for 2e-3). The two of bf16 leave 1.3e-3 there, and cost little where launches cost more.
Dtype RestartDtypeFor(const kernels::NewtonSchulzOptions& options, Dtype dtype, int64_t order) {
  constexpr int64_t kSmall = 1024;
  dtype = kernels::RestartDtype(options, dtype);
  return dtype == Dtype::kF16 && order < kSmall ? Dtype::kBF16 : dtype;
}

// Sums are fp32 and so is the output. Of one block the last product writes it itself, where its rows are aligned.
bool FinalAsFp32(const Places& p, const Operation& last) {
  if (last.beta != 0) return false;  // C and D have one type, and X is C
  return p.together > 1 ||
         p.shape.cols * static_cast<int64_t>(sizeof(float)) % kOutputAlignment == 0;
}

}  // namespace

absl::StatusOr<RunPlan> PlanRun(const kernels::NewtonSchulzOptions& options,
                                const BlockShape& shape) {
  const auto& [rows, cols, blocks] = shape;
  const Dtype dtype =
      options.deterministic ? Dtype::kF32 : options.iteration_dtype.value_or(Dtype::kF16);
  RunPlan plan;
  plan.form = kernels::ChooseForm(options, rows, cols);
  plan.element = ToElement(dtype);
  plan.tf32 = options.tf32;
  const std::vector<kernels::Coefficients> schedule = kernels::Schedule(options);
  std::vector<int> restarts;
  if (plan.form == NsForm::kGram) {
    restarts = kernels::Restarts(options, RestartDtypeFor(options, dtype, std::min(rows, cols)));
    RETURN_IF_ERROR(
        kernels::CheckRestarts(schedule, restarts, kernels::RestartDtype(options, dtype)));
  }
  plan.program = RecordProgram(plan.form, schedule, restarts, rows, cols);
  plan.places = PlaceBlocks(rows, cols, blocks, plan.element);
  const std::vector<Operation>& operations = plan.program.operations;
  const Operation& last = operations.back();
  plan.final_as_fp32 = FinalAsFp32(plan.places, last);
  Needs needs;
  needs.buffers = plan.program.buffers;
  needs.wide_x = plan.places.together > 1 && plan.final_as_fp32 ? 1 - last.x : -1;
  const auto aside = [](const Operation& op) { return op.aside; };
  needs.groups = std::any_of(operations.begin(), operations.end(), aside) ? kLaneGroups : 1;
  // Products are only cut as measurements say.
  needs.sides = !options.deterministic && plan.places.order >= 2 * kSmallestPart ? kSideLanes : 0;
  Arrange(plan.places, needs);
  return plan;
}

RoomSizes::RoomSizes(const RunPlan& plan) {
  const auto most = static_cast<uint64_t>(plan.places.together * plan.places.x_elements());
  operand = AlignUp(most * static_cast<uint64_t>(ElementBytes(plan.element)), kAlign);
  result = AlignUp(most * sizeof(float), kAlign);
  lanes = 1 + plan.places.sides;
  lane_workspace = plan.places.product_stride;
  sums = AlignUp(2 * sizeof(double), kAlign);
}

absl::StatusOr<kernels::NewtonSchulzMemory> MemoryOfNewtonSchulz(
    const kernels::NewtonSchulzOptions& options, const BlockShape& shape) {
  ASSIGN_OR_RETURN(const RunPlan plan, PlanRun(options, shape));
  kernels::NewtonSchulzMemory memory;
  memory.workspace_bytes = plan.places.bytes;
  if (!options.deterministic)
    memory.planning_bytes = RoomSizes(plan).total() + MemoryOfStream().device_bytes;
  return memory;
}

}  // namespace dmuon::cuda
