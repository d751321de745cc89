// The launchers of the vector kernels: everything that touches memory once and is no matrix product. C++17 and free of
// Abseil, because the CUDA compiler reads it. Each launcher enqueues on `stream` and returns the launch's own error; none
// allocates, waits or uses the default stream. The formulas stand beside the kernels in the .cuh files.
#ifndef DMUON_KERNELS_CUDA_LAUNCH_H_
#define DMUON_KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/shapes.h"
#include "kernels/ops/block_norm.h"
#include "kernels/ops/orthogonality_sample.h"

namespace dmuon::cuda {

// The most inputs of one mean: ranks of one node. They travel as a kernel argument, of which there are 4 KiB.
constexpr int kMaxInputs = 128;

// Private memory of one stream in which a reduction leaves its partial results. Operations of a stream run one after the
// other, so one is enough. Tickets are 0 between operations; reductions of several matrices at once have one each.
struct ReductionScratch {
  double* partials = nullptr;  // kMaxPartials
  unsigned* ticket = nullptr;  // kMostTogether
};

// Blocks of one shape that are run together: where each starts, in elements of the caller's memory. They travel as a kernel
// argument; results of one a block lie one behind the other.
struct BlockOffsets {
  int64_t at[kMostTogether] = {};
  int count = 1;
};

struct InputList {
  const void* at[kMaxInputs] = {};
  int count = 0;
};

struct MeanParams {
  InputList inputs;
  int64_t count = 0;
  float divisor = 1;
  float* mean = nullptr;
  double* square_sum = nullptr;  // may be null
  ReductionScratch scratch;
};
// Loads all kernels onto the thread's current device.
cudaError_t LoadStepKernels();
cudaError_t LoadMatrixKernels();
cudaError_t LoadMeasureKernels();

cudaError_t LaunchMean(cudaStream_t stream, const MeanParams& params, Element element,
                       bool accumulate);

struct LookaheadParams {
  const float* momentum = nullptr;
  const float* gradient = nullptr;
  float* update = nullptr;
  BlockOffsets blocks;
  int64_t count = 0;
  float mu = 0;
  float clip = 1;
  kernels::BlockNorm* norms = nullptr;  // of the update; may be null
  double* square_sums = nullptr;        // the same sums of squares; may be null
  ReductionScratch scratch;

  void Skip(int done) {  // so many blocks' results
    if (norms != nullptr) norms += done;
    if (square_sums != nullptr) square_sums += done;
  }
};
cudaError_t LaunchLookahead(cudaStream_t stream, const LookaheadParams& params, bool nesterov);

struct MuonCommitParams {
  float* momentum = nullptr;
  const float* gradient = nullptr;
  float* weight = nullptr;
  const float* orthogonal = nullptr;
  BlockOffsets blocks;
  int64_t count = 0;
  float mu = 0;
  float clip = 1;
  float keep = 1;  // 1 - decay
  float scale = 0;
  void* published = nullptr;      // null: nowhere
  double* square_sums = nullptr;  // of `orthogonal`; may be null
  ReductionScratch scratch;

  void Skip(int done) {
    if (square_sums != nullptr) square_sums += done;
  }
};
// `published`: the type of what is published.
cudaError_t LaunchMuonCommit(cudaStream_t stream, const MuonCommitParams& params,
                             Element published);

struct OrthogonalityParams {
  const float* matrix = nullptr;  // row-major
  BlockOffsets blocks;
  int64_t rows = 0, cols = 0;
  kernels::OrthogonalitySample sample;
  double* square_errors = nullptr;
  ReductionScratch scratch;

  void Skip(int done) { square_errors += done; }
};
cudaError_t LaunchOrthogonality(cudaStream_t stream, const OrthogonalityParams& params);

// Scalars are prepared on the host in double, as PyTorch does, and rounded once.
struct AdamwParams {
  float* weight = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const float* gradient = nullptr;
  int64_t count = 0;
  float keep = 1;  // 1 - lr * weight_decay
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float sqrt_correction2 = 1;  // sqrt(1 - beta2^step)
  float eps = 0;
  float step_size = 0;  // lr / (1 - beta1^step)
};
cudaError_t LaunchAdamw(cudaStream_t stream, const AdamwParams& params);

cudaError_t LaunchPublish(cudaStream_t stream, const float* from, Element element, void* to,
                          int64_t count);

struct NormsParams {
  const float* in = nullptr;
  BlockOffsets blocks;
  int64_t count = 0;  // of elements in a block
  kernels::BlockNorm* norms = nullptr;
  ReductionScratch scratch;

  void Skip(int done) { norms += done; }
};
cudaError_t LaunchNorms(cudaStream_t stream, const NormsParams& params);

// to = from 2^exponent / (||from||_F + 1e-7 max|from|), zeros for a block of zeros and in the padding. In `to` the blocks lie
// one behind the other.
struct NormalizeParams {
  const float* from = nullptr;
  BlockOffsets blocks;  // of `from`
  const kernels::BlockNorm* norms = nullptr;
  int exponent = 0;
  PaddedShape shape;
  void* to = nullptr;
};
cudaError_t LaunchNormalize(cudaStream_t stream, Element element, const NormalizeParams& params);
// to = from * scale, without the padding.
struct UnpadParams {
  const void* from = nullptr;
  float scale = 1;
  PaddedShape shape;
  float* to = nullptr;
  BlockOffsets blocks;  // of `to`
};
cudaError_t LaunchUnpad(cudaStream_t stream, Element element, const UnpadParams& params);

// The lower triangle (column-major; rows >= columns) of each of `batch` order x order matrices copied onto its upper one;
// and, where it is asked for, shifted = scale * matrix + diagonal * identity. The order is a multiple of 64.
struct MirrorParams {
  void* matrix = nullptr;
  int64_t order = 0;
  int64_t batch = 1;
  void* shifted = nullptr;
  float scale = 1;
  float diagonal = 0;
};
cudaError_t LaunchMirror(cudaStream_t stream, Element element, const MirrorParams& params);

// For the measurements of a plan: values in [-1, 1) that depend on seed and index only, and
// result[0] = ||a - b||^2, result[1] = ||b||^2.
cudaError_t LaunchFill(cudaStream_t stream, Element element, void* to, int64_t count,
                       uint32_t seed);
cudaError_t LaunchDistance(cudaStream_t stream, Element element, const void* a, const void* b,
                           int64_t count, const ReductionScratch& scratch, double* result);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_LAUNCH_H_
