// Where plans measure, outside a step: device memory with random contents, a stream and two events, given back when the plan
// is made.
#ifndef DMUON_KERNELS_CUDA_MEASURING_ROOM_H_
#define DMUON_KERNELS_CUDA_MEASURING_ROOM_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/buffer.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/run_plan.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/symmetric.h"

namespace dmuon::cuda {

class MeasuringRoom {
 public:
  // RESOURCE_EXHAUSTED when the device has no memory to spare.
  static absl::StatusOr<std::unique_ptr<MeasuringRoom>> Create(int device, Element element,
                                                               const RoomSizes& sizes);
  ~MeasuringRoom();
  MeasuringRoom(const MeasuringRoom&) = delete;
  MeasuringRoom& operator=(const MeasuringRoom&) = delete;

  const MeasuringGround& ground() const { return ground_; }

  // Times every way to cut the product on X X^T (or its square), compares each with the whole product, and returns the
  // fastest of those that agree. `measured` gets one entry a candidate.
  absl::StatusOr<CutChoice> BestCut(LtContext& context, CutRecord& record,
                                    const SymmetricShape& shape,
                                    std::vector<CutMeasurement>& measured);

 private:
  MeasuringRoom() = default;
  absl::Status MakeLanes(const RoomSizes& sizes);
  absl::StatusOr<CutMeasurement> MeasureCut(LtContext& context, const SymmetricShape& shape,
                                            CutChoice choice, MatmulOperands operands,
                                            const void* expected);
  absl::Status PrepareOperands(LtContext& context, const SymmetricShape& shape,
                               MatmulOperands& operands);

  Element element_ = Element::kF16;
  std::unique_ptr<StreamState> stream_;
  Buffer a_, b_, d_, expected_, workspace_, result_;
  MeasuringGround ground_;
  Lanes lanes_;
};

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_MEASURING_ROOM_H_
