// What a Newton-Schulz plan of the CUDA backend runs and where, before anything is measured or allocated. A function of the
// options and the shape alone: host code without CUDA's headers, so that memory can be planned where there is no GPU.
#ifndef DMUON_KERNELS_CUDA_RUN_PLAN_H_
#define DMUON_KERNELS_CUDA_RUN_PLAN_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/cuda/places.h"
#include "kernels/cuda/program.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "kernels/ops/backend.h"

namespace dmuon::cuda {

constexpr int64_t kOutputAlignment =
    16;  // bytes, of address and rows, for products to write the output themselves

constexpr Element ToElement(Dtype dtype) { return static_cast<Element>(dtype); }
static_assert(ToElement(Dtype::kF32) == Element::kF32 &&
              ToElement(Dtype::kBF16) == Element::kBF16 && ToElement(Dtype::kF16) == Element::kF16);

// What a plan is for: matrices of this shape, so many at a time.
struct BlockShape {
  int64_t rows = 0, cols = 0;
  int64_t blocks = 1;
};

struct RunPlan {
  kernels::NsForm form = kernels::NsForm::kGram;
  Element element = Element::kF16;
  bool tf32 = false;  // products of fp32 take TF32 factors
  Program program;
  Places places;
  bool final_as_fp32 = false;  // the last product gives fp32
};

// fp16 unless the options say otherwise; fp32 where they want it deterministic.
absl::StatusOr<RunPlan> PlanRun(const kernels::NewtonSchulzOptions& options,
                                const BlockShape& shape);

// What the measurements of a plan take of the device: three operands, a result, a workspace for each lane of a product, and
// two sums.
struct RoomSizes {
  explicit RoomSizes(const RunPlan& plan);
  size_t total() const {
    return 3 * operand + result + static_cast<size_t>(lanes) * lane_workspace + sums;
  }

  size_t operand = 0;
  size_t result = 0;
  int lanes = 0;
  size_t lane_workspace = 0;
  size_t sums = 0;
};

// ---- what the backend takes of memory

constexpr size_t kScratchBytes = kMaxPartials * sizeof(double) + kMostTogether * sizeof(unsigned);
// What is measured of a block in a step is 24 bytes: room for 20000 blocks of a slot in one copy.
constexpr size_t kStagingBytes = 1 << 20;

constexpr kernels::StreamMemory MemoryOfStream() { return {kScratchBytes, kStagingBytes}; }
absl::StatusOr<kernels::NewtonSchulzMemory> MemoryOfNewtonSchulz(
    const kernels::NewtonSchulzOptions& options, const BlockShape& shape);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_RUN_PLAN_H_
