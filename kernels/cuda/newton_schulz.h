// The Newton-Schulz plan of the CUDA backend: cuBLASLt products between two kernels that scale on the way in and out.
#ifndef DMUON_KERNELS_CUDA_NEWTON_SCHULZ_H_
#define DMUON_KERNELS_CUDA_NEWTON_SCHULZ_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/run_plan.h"
#include "kernels/cuda/symmetric.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::cuda {

// What a plan would otherwise find out. For tests and measurements.
struct NewtonSchulzTuning {
  bool measure = true;  // false: the library's first algorithms and whole products
  std::optional<CutChoice> gram_cut, square_cut;
};

// What was measured when a plan was made.
struct NewtonSchulzMeasurements {
  std::vector<CutMeasurement> gram, square;
};

class CudaNewtonSchulz : public kernels::NewtonSchulz {
 public:
  virtual const NewtonSchulzMeasurements& measurements() const = 0;
};

// `context` must outlive the plan; `record` holds what other plans measured. Takes what MemoryOfNewtonSchulz (run_plan.h)
// says. Deterministic plans measure nothing, so that nothing but shape, device and library decides what runs.
absl::StatusOr<std::unique_ptr<CudaNewtonSchulz>> PlanOnCuda(
    LtContext& context, CutRecord& record, const kernels::NewtonSchulzOptions& options,
    const NewtonSchulzTuning& tuning, const BlockShape& shape);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_NEWTON_SCHULZ_H_
