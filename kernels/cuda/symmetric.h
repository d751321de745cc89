// A matrix product whose result is symmetric, so that the lower triangle of it is all that need be computed: in blocks, by
// ordinary products, then mirrored. Which way of cutting is fastest depends on order, depth and device, so each is measured
// when the product is made, outside the step, and is taken only if its result agrees with that of the whole product.
#ifndef DMUON_KERNELS_CUDA_SYMMETRIC_H_
#define DMUON_KERNELS_CUDA_SYMMETRIC_H_

#include <array>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/places.h"

namespace dmuon::cuda {

// A stream, others beside it that run the parts of one product at the same time, and a workspace for each. All parts
// start after what is on `main`, and what follows on `main` starts after all parts.
struct Lanes {
  static constexpr int kSides = kSideLanes;

  cudaStream_t main = nullptr;
  std::array<cudaStream_t, kSides> side = {};  // null: everything runs on main
  cudaEvent_t fork = nullptr;
  std::array<cudaEvent_t, kSides> join = {};
  char* workspace = nullptr;
  size_t workspace_stride = 0;  // bytes for each of main and the sides
};

// How the triangle is cut.
enum class Cut {
  kWhole,   // not at all: one product, not mirrored
  kMirror,  // one product, and its lower triangle mirrored, so that the result is exactly symmetric
  kPanels,  // columns of blocks from the diagonal down, `parts` of them
  kLevels,  // the square below the diagonal, then the two triangles left, `parts` times: batches of equal blocks
};

struct CutChoice {
  Cut cut = Cut::kWhole;
  int parts = 0;

  std::string name() const {
    switch (cut) {
      case Cut::kWhole: return "whole";
      case Cut::kMirror: return "mirror";
      case Cut::kPanels: return "panels" + std::to_string(parts);
      case Cut::kLevels: return "levels" + std::to_string(parts);
    }
    return "?";
  }
};

// D (order x order) = alpha op(A) op(B) + beta C, known to be symmetric; `batch` times, with all operands of one kind one
// behind the other. `order` is a multiple of 64.
struct SymmetricShape {
  int64_t order = 0, depth = 0;
  int64_t batch = 1;
  bool transpose_a = false, transpose_b = false;
  int64_t lda = 0, ldb = 0;
  Element element = Element::kF16;
  bool tf32 = false;

  auto key() const {
    return std::make_tuple(order, depth, batch, transpose_a, transpose_b, lda, ldb, element, tf32);
  }
};

// What was found when a product was made, for the record of the plan.
struct CutMeasurement {
  CutChoice choice;
  float milliseconds = 0;
  double difference = 0;  // relative to the whole product, Frobenius
  bool agrees = false;
};

// The measurements of one device, kept as long as its backend: a shape is measured once. Thread-safe.
class CutRecord {
 public:
  // Empty: not measured yet.
  std::vector<CutMeasurement> Find(const SymmetricShape& shape) const;
  void Keep(const SymmetricShape& shape, std::vector<CutMeasurement> measurements);

 private:
  mutable absl::Mutex mutex_;
  std::map<decltype(SymmetricShape().key()), std::vector<CutMeasurement>> known_
      ABSL_GUARDED_BY(mutex_);
};

class SymmetricProduct {
 public:
  // The product cut in one given way; FAILED_PRECONDITION where the order does not allow it.
  static absl::StatusOr<SymmetricProduct> Create(LtContext& context, const SymmetricShape& shape,
                                                 CutChoice choice, const MeasuringGround* ground);

  absl::Status Run(const Lanes& lanes, const MatmulOperands& operands) const;
  // The same, and shifted = scale D + diagonal I.
  absl::Status RunShifted(const Lanes& lanes, const MatmulOperands& operands, float scale,
                          float diagonal, void* shifted) const;

  CutChoice choice() const { return choice_; }
  const SymmetricShape& shape() const { return shape_; }

  // The ways to cut worth measuring for this shape.
  static std::vector<CutChoice> Candidates(const SymmetricShape& shape);

 private:
  struct Part {
    Matmul matmul;
    int64_t a, b, d;  // offsets in elements
    int lane;         // 0: main
  };
  SymmetricProduct() = default;
  absl::Status AddPart(LtContext& context, const MeasuringGround* ground, int64_t row, int64_t col,
                       int64_t rows, int64_t cols, int64_t batch);
  absl::Status RunParts(const Lanes& lanes, const MatmulOperands& operands) const;
  void AssignLanes();

  SymmetricShape shape_;
  CutChoice choice_;
  std::vector<Part> parts_;
};

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_SYMMETRIC_H_
