// The kernels of a step outside Newton-Schulz (docs/numerics.md): mean over ranks, lookahead, muon commit, AdamW, publish.
// Each passes over memory once. The float64 references that they are judged against are in reference.h.
#ifndef DMUON_KERNELS_CUDA_STEP_KERNELS_CUH_
#define DMUON_KERNELS_CUDA_STEP_KERNELS_CUH_

#include <type_traits>

#include "kernels/cuda/vector.cuh"

namespace dmuon::cuda {

// mean = (accumulate ? mean : 0) + (inputs[0] + inputs[1] + ...) / divisor, in rank order, in fp32;
// square_sum = sum mean^2 in float64: 1e30 is large and not infinite, NaN and Inf arrive as themselves.
template <typename T, bool kAligned, bool kAccumulate>
__global__ void __launch_bounds__(kThreads) MeanKernel(const __grid_constant__ MeanParams p) {
  // Unaligned quads are four loads each under four conditions: all at once they would not fit into the registers.
  constexpr int kAtOnce = kAligned ? kQuads : 1;
  double squares = 0;
  for (int64_t tile = blockIdx.x; tile * kTile < p.count; tile += gridDim.x) {
#pragma unroll 1
    for (int first = 0; first < kQuads; first += kAtOnce) {
      Quad sum[kAtOnce];
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        sum[q] = LoadQuad<kAligned>(static_cast<const T*>(p.inputs.at[0]),
                                    QuadIndex(tile, first + q), p.count);
      }
      for (int rank = 1; rank < p.inputs.count; ++rank) {
        const T* input = static_cast<const T*>(p.inputs.at[rank]);
        Quad more[kAtOnce];
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q) {
          more[q] = LoadQuad<kAligned>(input, QuadIndex(tile, first + q), p.count);
        }
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[q].at[i] += more[q].at[i];
        }
      }
#pragma unroll
      for (int q = 0; q < kAtOnce; ++q) {
        const int64_t index = QuadIndex(tile, first + q);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[q].at[i] = sum[q].at[i] / p.divisor;
        if (kAccumulate) {
          const Quad before = LoadQuad<kAligned>(p.mean, index, p.count);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[q].at[i] = before.at[i] + sum[q].at[i];
        }
        StoreQuad<kAligned>(p.mean, index, p.count, sum[q]);
        // Elements beyond count are zeros over the divisor; a divisor of 0 must not make them NaN.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const double value = index + i < p.count ? sum[q].at[i] : 0.0f;
          squares += value * value;
        }
      }
    }
  }
  LeaveSquareSum(p.scratch, squares, p.square_sum);
}

// Each row of the grid has a block of its own in the next two.

// U = c G + mu (mu M + c G) with nesterov, else mu M + c G; and its norm.
template <bool kAligned, bool kNesterov, bool kNorms>
__global__ void __launch_bounds__(kThreads)
    LookaheadKernel(const __grid_constant__ LookaheadParams p) {
  const int64_t begin = p.blocks.at[blockIdx.y];
  Magnitude magnitude;
  for (int64_t tile = blockIdx.x; tile * kTile < p.count; tile += gridDim.x) {
    Quad m[kQuads], g[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
      m[q] = LoadQuad<kAligned>(p.momentum + begin, QuadIndex(tile, q), p.count);
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
      g[q] = LoadQuad<kAligned>(p.gradient + begin, QuadIndex(tile, q), p.count);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float gradient = p.clip * g[q].at[i];
        const float momentum = p.mu * m[q].at[i] + gradient;
        m[q].at[i] = kNesterov ? gradient + p.mu * momentum : momentum;
      }
      StoreQuad<kAligned>(p.update + begin, QuadIndex(tile, q), p.count, m[q]);
      if (kNorms) magnitude.Add(m[q]);
    }
  }
  if (kNorms) LeaveNorm(p.scratch, magnitude, p.norms, p.square_sums);
}

// M = mu M + c G;  W = W (1 - decay) - scale O, and W rounded to T beside it; void: not published. square_sums = sum O^2 in
// float64, for telemetry.
template <bool kAligned, typename T>
__global__ void __launch_bounds__(kThreads)
    MuonCommitKernel(const __grid_constant__ MuonCommitParams p) {
  constexpr int kHalf = kQuads / 2;  // four streams in: half the quads keep as many loads in flight
  const int64_t begin = p.blocks.at[blockIdx.y];
  double squares = 0;
  for (int64_t tile = blockIdx.x; tile * kTile < p.count; tile += gridDim.x) {
#pragma unroll
    for (int half = 0; half < kQuads; half += kHalf) {
      Quad m[kHalf], g[kHalf], w[kHalf], o[kHalf];
#pragma unroll
      for (int q = 0; q < kHalf; ++q) {
        const int64_t index = QuadIndex(tile, half + q);
        m[q] = LoadQuad<kAligned>(p.momentum + begin, index, p.count);
        g[q] = LoadQuad<kAligned>(p.gradient + begin, index, p.count);
        w[q] = LoadQuad<kAligned>(p.weight + begin, index, p.count);
        o[q] = LoadQuad<kAligned>(p.orthogonal + begin, index, p.count);
      }
#pragma unroll
      for (int q = 0; q < kHalf; ++q) {
        const int64_t index = QuadIndex(tile, half + q);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          m[q].at[i] = p.mu * m[q].at[i] + p.clip * g[q].at[i];
          w[q].at[i] = w[q].at[i] * p.keep - p.scale * o[q].at[i];
          const double value = o[q].at[i];
          squares += value * value;
        }
        StoreQuad<kAligned>(p.momentum + begin, index, p.count, m[q]);
        StoreQuad<kAligned>(p.weight + begin, index, p.count, w[q]);
        if constexpr (!std::is_void_v<T>)
          StoreQuad<kAligned>(static_cast<T*>(p.published) + begin, index, p.count, w[q]);
      }
    }
  }
  LeaveSquareSum(p.scratch, squares,
                 p.square_sums != nullptr ? p.square_sums + blockIdx.y : nullptr);
}

// PyTorch's order of operations: decay, lerp, second moment, sqrt(v) / sqrt(correction2) + eps, addcdiv.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads) AdamwKernel(const __grid_constant__ AdamwParams p) {
  constexpr int kHalf = kQuads / 2;
  for (int64_t tile = blockIdx.x; tile * kTile < p.count; tile += gridDim.x) {
#pragma unroll
    for (int half = 0; half < kQuads; half += kHalf) {
      Quad m[kHalf], v[kHalf], w[kHalf], g[kHalf];
#pragma unroll
      for (int q = 0; q < kHalf; ++q) {
        const int64_t index = QuadIndex(tile, half + q);
        m[q] = LoadQuad<kAligned>(p.exp_avg, index, p.count);
        v[q] = LoadQuad<kAligned>(p.exp_avg_sq, index, p.count);
        w[q] = LoadQuad<kAligned>(p.weight, index, p.count);
        g[q] = LoadQuad<kAligned>(p.gradient, index, p.count);
      }
#pragma unroll
      for (int q = 0; q < kHalf; ++q) {
        const int64_t index = QuadIndex(tile, half + q);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float gradient = g[q].at[i];
          m[q].at[i] = m[q].at[i] + p.one_minus_beta1 * (gradient - m[q].at[i]);
          v[q].at[i] = v[q].at[i] * p.beta2 + p.one_minus_beta2 * gradient * gradient;
          const float denominator = sqrtf(v[q].at[i]) / p.sqrt_correction2 + p.eps;
          w[q].at[i] = w[q].at[i] * p.keep - p.step_size * (m[q].at[i] / denominator);
        }
        StoreQuad<kAligned>(p.exp_avg, index, p.count, m[q]);
        StoreQuad<kAligned>(p.exp_avg_sq, index, p.count, v[q]);
        StoreQuad<kAligned>(p.weight, index, p.count, w[q]);
      }
    }
  }
}

// to = from rounded to nearest even.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) PublishKernel(const float* from, T* to, int64_t count) {
  for (int64_t tile = blockIdx.x; tile * kTile < count; tile += gridDim.x) {
    Quad x[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) x[q] = LoadQuad<kAligned>(from, QuadIndex(tile, q), count);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) StoreQuad<kAligned>(to, QuadIndex(tile, q), count, x[q]);
  }
}

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_STEP_KERNELS_CUH_
