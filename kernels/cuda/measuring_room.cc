#include "kernels/cuda/measuring_room.h"

#include <cmath>

#include "base/status_macros.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {
namespace {

// Two ways of summing round differently, and now and then to another neighbour in the element type.
double Tolerance(const SymmetricShape& shape) {
  switch (shape.element) {
    case Element::kF32: return shape.tf32 ? 1e-3 : 1e-5;
    case Element::kF16: return 1e-3;
    case Element::kBF16: return 8e-3;
  }
  return 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MeasuringRoom>> MeasuringRoom::Create(int device, Element element,
                                                                     const RoomSizes& sizes) {
  auto room = std::unique_ptr<MeasuringRoom>(new MeasuringRoom());
  room->element_ = element;
  ASSIGN_OR_RETURN(room->stream_, StreamState::Create(device));
  ASSIGN_OR_RETURN(room->a_, Buffer::Allocate(device, sizes.operand));
  ASSIGN_OR_RETURN(room->b_, Buffer::Allocate(device, sizes.operand));
  ASSIGN_OR_RETURN(room->d_, Buffer::Allocate(device, sizes.result));
  ASSIGN_OR_RETURN(room->expected_, Buffer::Allocate(device, sizes.operand));
  ASSIGN_OR_RETURN(
      room->workspace_,
      Buffer::Allocate(device, sizes.lane_workspace * static_cast<size_t>(sizes.lanes)));
  ASSIGN_OR_RETURN(room->result_, Buffer::Allocate(device, sizes.sums));
  const int64_t count = static_cast<int64_t>(sizes.operand) / ElementBytes(element);
  RETURN_IF_ERROR(
      ToStatus(LaunchFill(room->stream_->get(), element, room->a_.get(), count, 1), "filling"));
  RETURN_IF_ERROR(
      ToStatus(LaunchFill(room->stream_->get(), element, room->b_.get(), count, 2), "filling"));
  RETURN_IF_ERROR(room->MakeLanes(sizes));
  return room;
}

absl::Status MeasuringRoom::MakeLanes(const RoomSizes& sizes) {
  ground_.stream = stream_->get();
  ground_.a = a_.get();
  ground_.b = b_.get();
  ground_.d = d_.get();
  ground_.workspace = workspace_.get();
  RETURN_IF_ERROR(ToStatus(cudaEventCreate(&ground_.start), "creating an event"));
  RETURN_IF_ERROR(ToStatus(cudaEventCreate(&ground_.stop), "creating an event"));
  lanes_.main = stream_->get();
  lanes_.workspace = workspace_.as<char>();
  lanes_.workspace_stride = sizes.lane_workspace;
  RETURN_IF_ERROR(ToStatus(cudaEventCreateWithFlags(&lanes_.fork, cudaEventDisableTiming),
                           "creating an event"));
  for (int i = 0; i + 1 < sizes.lanes; ++i) {
    RETURN_IF_ERROR(ToStatus(cudaEventCreateWithFlags(&lanes_.join[i], cudaEventDisableTiming),
                             "creating an event"));
    RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&lanes_.side[i], cudaStreamNonBlocking),
                             "creating a stream"));
  }
  return absl::OkStatus();
}

MeasuringRoom::~MeasuringRoom() {
  for (cudaEvent_t event : {ground_.start, ground_.stop, lanes_.fork}) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  for (cudaEvent_t event : lanes_.join) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  for (cudaStream_t stream : lanes_.side) {
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
}

// The operands that a symmetric result needs: X and X^T, or one symmetric matrix twice and once more to be added. Leaves the
// whole product of them in expected_.
absl::Status MeasuringRoom::PrepareOperands(LtContext& context, const SymmetricShape& shape,
                                            MatmulOperands& operands) {
  const bool square = shape.order == shape.depth && shape.transpose_a && !shape.transpose_b;
  operands.a = operands.b = a_.get();
  operands.alpha = 1 / static_cast<float>(shape.depth);
  if (square) {
    // b becomes the symmetric a a^T / order.
    ASSIGN_OR_RETURN(const SymmetricProduct first,
                     SymmetricProduct::Create(context, shape, {Cut::kMirror, 0}, nullptr));
    MatmulOperands make = operands;
    make.d = b_.get();
    RETURN_IF_ERROR(first.Run(lanes_, make));
    operands.a = operands.b = operands.c = b_.get();
    operands.alpha = operands.beta = 1;
  }
  ASSIGN_OR_RETURN(const SymmetricProduct whole,
                   SymmetricProduct::Create(context, shape, {Cut::kWhole, 0}, nullptr));
  MatmulOperands expect = operands;
  expect.d = expected_.get();
  RETURN_IF_ERROR(whole.Run(lanes_, expect));
  return stream_->Synchronize();
}

absl::StatusOr<CutMeasurement> MeasuringRoom::MeasureCut(LtContext& context,
                                                         const SymmetricShape& shape,
                                                         CutChoice choice, MatmulOperands operands,
                                                         const void* expected) {
  ASSIGN_OR_RETURN(const SymmetricProduct product,
                   SymmetricProduct::Create(context, shape, choice, &ground_));
  operands.d = d_.get();
  const int64_t count = shape.batch * shape.order * shape.order;
  // All ones is NaN in every element type: what a way of cutting leaves out does not pass for a result.
  RETURN_IF_ERROR(
      ToStatus(cudaMemsetAsync(d_.get(), 0xff, static_cast<size_t>(count * ElementBytes(element_)),
                               lanes_.main),
               "poisoning"));
  CutMeasurement measurement;
  measurement.choice = choice;
  ASSIGN_OR_RETURN(measurement.milliseconds, Measure(lanes_.main, ground_.start, ground_.stop, [&] {
                     return product.Run(lanes_, operands);
                   }));
  RETURN_IF_ERROR(ToStatus(LaunchDistance(lanes_.main, element_, d_.get(), expected, count,
                                          stream_->scratch(), result_.as<double>()),
                           "comparing"));
  double squares[2] = {};
  stream_->CopyToHost(squares, result_.get(), sizeof(squares));
  RETURN_IF_ERROR(stream_->Synchronize());
  measurement.difference = std::sqrt(squares[0] / squares[1]);
  measurement.agrees = measurement.difference <= Tolerance(shape);  // false for NaN
  return measurement;
}

absl::StatusOr<CutChoice> MeasuringRoom::BestCut(LtContext& context, CutRecord& record,
                                                 const SymmetricShape& shape,
                                                 std::vector<CutMeasurement>& measured) {
  measured = record.Find(shape);
  if (measured.empty()) {
    MatmulOperands operands;
    RETURN_IF_ERROR(PrepareOperands(context, shape, operands));
    for (const CutChoice& choice : SymmetricProduct::Candidates(shape)) {
      ASSIGN_OR_RETURN(CutMeasurement m,
                       MeasureCut(context, shape, choice, operands, expected_.get()));
      measured.push_back(m);
    }
    record.Keep(shape, measured);
  }
  CutChoice best = {Cut::kMirror, 0};
  float best_time = -1;
  for (const CutMeasurement& m : measured) {
    // A product that is not exactly symmetric feeds its asymmetry into the next ones; it is measured for the record.
    if (m.choice.cut == Cut::kWhole || !m.agrees) continue;
    if (best_time >= 0 && m.milliseconds >= best_time) continue;
    best_time = m.milliseconds;
    best = m.choice;
  }
  return best;
}

}  // namespace dmuon::cuda
