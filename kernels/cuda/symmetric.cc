#include "kernels/cuda/symmetric.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {
namespace {

constexpr int64_t kGrain = 64;  // blocks start at multiples of it: 128 bytes of a 16-bit type

const void* At(const void* base, int64_t offset, Element element) {
  return static_cast<const char*>(base) + offset * ElementBytes(element);
}

void* At(void* base, int64_t offset, Element element) {
  return static_cast<char*>(base) + offset * ElementBytes(element);
}

}  // namespace

std::vector<CutMeasurement> CutRecord::Find(const SymmetricShape& shape) const {
  absl::MutexLock lock(&mutex_);
  const auto found = known_.find(shape.key());
  return found != known_.end() ? found->second : std::vector<CutMeasurement>();
}

void CutRecord::Keep(const SymmetricShape& shape, std::vector<CutMeasurement> measurements) {
  absl::MutexLock lock(&mutex_);
  known_[shape.key()] = std::move(measurements);
}

std::vector<CutChoice> SymmetricProduct::Candidates(const SymmetricShape& shape) {
  const int64_t order = shape.order;
  std::vector<CutChoice> choices = {{Cut::kWhole, 0}, {Cut::kMirror, 0}};
  for (int panels : {2, 3, 4, 6, 8}) {
    if (order / panels >= kSmallestPart) choices.push_back({Cut::kPanels, panels});
  }
  // Levels are batches themselves.
  for (int levels : {1, 2, 3}) {
    if (shape.batch == 1 && order % (kGrain << levels) == 0 && (order >> levels) >= kSmallestPart)
      choices.push_back({Cut::kLevels, levels});
  }
  return choices;
}

absl::StatusOr<SymmetricProduct> SymmetricProduct::Create(LtContext& context,
                                                          const SymmetricShape& shape,
                                                          CutChoice choice,
                                                          const MeasuringGround* ground) {
  SymmetricProduct product;
  product.shape_ = shape;
  product.choice_ = choice;
  const int64_t order = shape.order;
  switch (choice.cut) {
    case Cut::kWhole:
    case Cut::kMirror:
      RETURN_IF_ERROR(product.AddPart(context, ground, 0, 0, order, order, 1));
      break;
    case Cut::kPanels:
      if (order / choice.parts < kGrain)
        return absl::FailedPreconditionError("more panels than the order allows");
      for (int p = 0; p < choice.parts; ++p) {
        const int64_t begin = order / kGrain * p / choice.parts * kGrain;
        const int64_t end = order / kGrain * (p + 1) / choice.parts * kGrain;
        RETURN_IF_ERROR(
            product.AddPart(context, ground, begin, begin, order - begin, end - begin, 1));
      }
      break;
    case Cut::kLevels:
      if (shape.batch != 1 || order % (kGrain << choice.parts) != 0) {
        return absl::FailedPreconditionError(
            "the order cannot be halved that often, or not in a batch");
      }
      for (int level = 1; level <= choice.parts; ++level) {
        const int64_t size = order >> level;
        RETURN_IF_ERROR(
            product.AddPart(context, ground, size, 0, size, size, int64_t{1} << (level - 1)));
      }
      RETURN_IF_ERROR(product.AddPart(context, ground, 0, 0, order >> choice.parts,
                                      order >> choice.parts, int64_t{1} << choice.parts));
      break;
  }
  product.AssignLanes();
  return product;
}

// The block of `rows` x `cols` at (row, col), and batch - 1 more of it along the diagonal, each twice its size further when
// it lies below the diagonal and just beside the last when it lies on it.
absl::Status SymmetricProduct::AddPart(LtContext& context, const MeasuringGround* ground,
                                       int64_t row, int64_t col, int64_t rows, int64_t cols,
                                       int64_t batch) {
  MatmulShape m;
  m.m = rows;
  m.n = cols;
  m.k = shape_.depth;
  m.transpose_a = shape_.transpose_a;
  m.transpose_b = shape_.transpose_b;
  m.lda = shape_.lda;
  m.ldb = shape_.ldb;
  m.ldd = shape_.order;
  m.in = m.out = shape_.element;
  m.tf32 = shape_.tf32;
  const int64_t row_step = shape_.transpose_a ? shape_.lda : 1;
  const int64_t col_step = shape_.transpose_b ? 1 : shape_.ldb;
  if (shape_.batch > 1) {
    m.batch = shape_.batch;
    m.stride_a = m.stride_b = shape_.order * shape_.depth;
    m.stride_d = shape_.order * shape_.order;
  }
  if (batch > 1) {
    const int64_t step = row == col ? rows : 2 * rows;
    m.batch = batch;
    m.stride_a = step * row_step;
    m.stride_b = step * col_step;
    m.stride_d = step * (m.ldd + 1);
  }
  ASSIGN_OR_RETURN(Matmul matmul, Matmul::Create(context, m, ground));
  parts_.push_back({std::move(matmul), row * row_step, col * col_step, col * m.ldd + row, 0});
  return absl::OkStatus();
}

// Longest first onto the lane that is free first.
void SymmetricProduct::AssignLanes() {
  std::stable_sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
    return a.matmul.flops() > b.matmul.flops();
  });
  std::array<double, 1 + Lanes::kSides> load = {};
  for (Part& part : parts_) {
    part.lane = static_cast<int>(std::min_element(load.begin(), load.end()) - load.begin());
    load[static_cast<size_t>(part.lane)] += part.matmul.flops();
  }
}

absl::Status SymmetricProduct::RunParts(const Lanes& lanes, const MatmulOperands& operands) const {
  const bool fork = lanes.side[0] != nullptr && parts_.size() > 1;
  if (fork) {
    RETURN_IF_ERROR(ToStatus(cudaEventRecord(lanes.fork, lanes.main), "forking"));
    for (int i = 0; i < Lanes::kSides; ++i) {
      RETURN_IF_ERROR(ToStatus(cudaStreamWaitEvent(lanes.side[i], lanes.fork, 0), "forking"));
    }
  }
  for (const Part& part : parts_) {
    const int lane = fork ? part.lane : 0;
    MatmulOperands mine = operands;
    mine.a = At(operands.a, part.a, shape_.element);
    mine.b = At(operands.b, part.b, shape_.element);
    mine.c = operands.c != nullptr ? At(operands.c, part.d, shape_.element) : nullptr;
    mine.d = At(operands.d, part.d, shape_.element);
    RETURN_IF_ERROR(ToStatus(
        part.matmul.Run(lane == 0 ? lanes.main : lanes.side[lane - 1], mine,
                        lanes.workspace + lanes.workspace_stride * static_cast<size_t>(lane)),
        "a matrix product"));
  }
  if (fork) {
    for (int i = 0; i < Lanes::kSides; ++i) {
      RETURN_IF_ERROR(ToStatus(cudaEventRecord(lanes.join[i], lanes.side[i]), "joining"));
      RETURN_IF_ERROR(ToStatus(cudaStreamWaitEvent(lanes.main, lanes.join[i], 0), "joining"));
    }
  }
  return absl::OkStatus();
}

absl::Status SymmetricProduct::Run(const Lanes& lanes, const MatmulOperands& operands) const {
  RETURN_IF_ERROR(RunParts(lanes, operands));
  if (choice_.cut == Cut::kWhole) return absl::OkStatus();
  MirrorParams mirror;
  mirror.matrix = operands.d;
  mirror.order = shape_.order;
  mirror.batch = shape_.batch;
  return ToStatus(LaunchMirror(lanes.main, shape_.element, mirror), "mirroring");
}

absl::Status SymmetricProduct::RunShifted(const Lanes& lanes, const MatmulOperands& operands,
                                          float scale, float diagonal, void* shifted) const {
  RETURN_IF_ERROR(RunParts(lanes, operands));
  MirrorParams mirror;
  mirror.matrix = operands.d;
  mirror.order = shape_.order;
  mirror.batch = shape_.batch;
  mirror.shifted = shifted;
  mirror.scale = scale;
  mirror.diagonal = diagonal;
  return ToStatus(LaunchMirror(lanes.main, shape_.element, mirror), "mirroring");
}

}  // namespace dmuon::cuda
