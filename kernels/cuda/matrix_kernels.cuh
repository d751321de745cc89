// The kernels around the matrix products of Newton-Schulz: normalise and cast, mirror a triangle, cast back.
#ifndef DMUON_KERNELS_CUDA_MATRIX_KERNELS_CUH_
#define DMUON_KERNELS_CUDA_MATRIX_KERNELS_CUH_

#include "kernels/cuda/vector.cuh"

namespace dmuon::cuda {

// Each row of the grid has a matrix of its own.

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) NormsKernel(const __grid_constant__ NormsParams p) {
  const float* in = p.in + p.blocks.at[blockIdx.y];
  Magnitude magnitude;
  for (int64_t tile = blockIdx.x; tile * kTile < p.count; tile += gridDim.x) {
    Quad x[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) x[q] = LoadQuad<kAligned>(in, QuadIndex(tile, q), p.count);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) magnitude.Add(x[q]);
  }
  LeaveNorm(p.scratch, magnitude, p.norms, nullptr);
}

// How an input of Newton-Schulz is scaled: x * power1 * power2 * factor. Two powers of two, because one alone leaves the range
// of fp32 for inputs near 1e-38.
struct Scaling {
  float power1 = 0;
  float power2 = 0;
  float factor = 0;
};
__device__ __forceinline__ Scaling ScalingFor(const kernels::BlockNorm& norm, int exponent) {
  Scaling s;
  if (norm.square_sum == 0) return s;  // NaN goes on, and through
  // The squares are float64, whose range holds the square of every fp32 number, so dividing by the largest magnitude first, as
  // docs/numerics.md has it, is the same factor.
  const double factor = ldexp(1.0, exponent) / (sqrt(norm.square_sum) + 1e-7 * norm.largest);
  // A NaN or zero factor has no exponent of use: leave it in `factor` alone.
  const int power = factor > 0 && factor < 1e300 ? ilogb(factor) : 0;
  s.power1 = static_cast<float>(ldexp(1.0, power / 2));
  s.power2 = static_cast<float>(ldexp(1.0, power - power / 2));
  s.factor = static_cast<float>(ldexp(factor, -power));
  return s;
}

constexpr int kTileQuads = kThreads * kQuads;

// A quad is four columns of one row; their number is below 2^32. Rows beyond shape.rows and columns beyond shape.cols are zeros.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    NormalizeKernel(const __grid_constant__ NormalizeParams p) {
  const PaddedShape& shape = p.shape;
  const float* from = p.from + p.blocks.at[blockIdx.y];
  T* to = static_cast<T*>(p.to) + blockIdx.y * (shape.padded_rows * shape.padded_cols);
  __shared__ Scaling shared;
  if (threadIdx.x == 0) shared = ScalingFor(p.norms[blockIdx.y], p.exponent);
  __syncthreads();
  const Scaling n = shared;
  const uint32_t quads = static_cast<uint32_t>(shape.padded_cols / 4);
  const int64_t total = shape.padded_rows * quads;
  for (int64_t tile = blockIdx.x; tile * kTileQuads < total; tile += gridDim.x) {
    Quad x[kQuads];
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int64_t quad = tile * kTileQuads + u * kThreads + threadIdx.x;
      const int64_t row = static_cast<uint32_t>(quad) / quads;
      x[u] = Quad{};
      if (quad < total && row < shape.rows) {
        x[u] = LoadQuad<kAligned>(from + row * shape.cols, (quad - row * quads) * 4, shape.cols);
      }
    }
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int64_t quad = tile * kTileQuads + u * kThreads + threadIdx.x;
      if (quad >= total) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[u].at[i] = x[u].at[i] * n.power1 * n.power2 * n.factor;
      StoreQuad<true>(to, quad * 4, total * 4, x[u]);
    }
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) UnpadKernel(const __grid_constant__ UnpadParams p) {
  const PaddedShape& shape = p.shape;
  const T* from =
      static_cast<const T*>(p.from) + blockIdx.y * (shape.padded_rows * shape.padded_cols);
  float* to = p.to + p.blocks.at[blockIdx.y];
  const uint32_t quads = static_cast<uint32_t>((shape.cols + 3) / 4);
  const int64_t total = shape.rows * quads;
  for (int64_t tile = blockIdx.x; tile * kTileQuads < total; tile += gridDim.x) {
    Quad x[kQuads];
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int64_t quad = tile * kTileQuads + u * kThreads + threadIdx.x;
      if (quad >= total) continue;
      const int64_t row = static_cast<uint32_t>(quad) / quads;
      x[u] = LoadQuad<true>(from + row * shape.padded_cols, (quad - row * quads) * 4,
                            shape.padded_cols);
    }
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int64_t quad = tile * kTileQuads + u * kThreads + threadIdx.x;
      if (quad >= total) continue;
      const int64_t row = static_cast<uint32_t>(quad) / quads;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[u].at[i] *= p.scale;
      StoreQuad<kAligned>(to + row * shape.cols, (quad - row * quads) * 4, shape.cols, x[u]);
    }
  }
}

constexpr int kMirrorTile = 64;

// One block a pair of tiles (row >= column), numbered along the triangle. In a diagonal tile only entries above the diagonal
// are written and only those below it are read, so reads and writes never meet.
template <typename T, bool kShift>
__global__ void __launch_bounds__(kThreads) MirrorKernel(const __grid_constant__ MirrorParams p) {
  const int64_t order = p.order;
  T* matrix = static_cast<T*>(p.matrix) + blockIdx.y * (order * order);
  T* shifted = kShift ? static_cast<T*>(p.shifted) + blockIdx.y * (order * order) : nullptr;
  __shared__ T tile[kMirrorTile][kMirrorTile + 2];
  // blockIdx.x = row (row + 1) / 2 + column, column <= row; the root may be off by one through rounding.
  const int64_t number = blockIdx.x;
  int64_t row =
      static_cast<int64_t>((sqrtf(8.0f * static_cast<float>(number) + 1.0f) - 1.0f) / 2.0f);
  while (row * (row + 1) / 2 > number) --row;
  while ((row + 1) * (row + 2) / 2 <= number) ++row;
  const int64_t col = number - row * (row + 1) / 2;
  const int64_t row0 = row * kMirrorTile;
  const int64_t col0 = col * kMirrorTile;

  // Column-major: entry (r, c) is at c * order + r. Lanes run along r when reading, along c (rows of the mirror) when writing.
  constexpr int kPacks = kMirrorTile / 4;
  for (int pack = threadIdx.x; pack < kMirrorTile * kPacks; pack += kThreads) {
    const int c = pack / kPacks;
    const int r = pack % kPacks * 4;
    const Packed<T> in = LoadPacked(matrix + (col0 + c) * order + row0 + r);
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[c][r + i] = in.at[i];
  }
  __syncthreads();
  for (int pack = threadIdx.x; pack < kMirrorTile * kPacks; pack += kThreads) {
    // The mirrored entry (col0 + c .. c+3, row0 + r).
    const int r = pack / kPacks;
    const int c = pack % kPacks * 4;
    Packed<T> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.at[i] = row0 + r >= col0 + c + i ? tile[c + i][r] : tile[r][c + i];
    }
    T* to = matrix + (row0 + r) * order + col0 + c;
    if (row != col) {
      StorePacked(to, out);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (c + i < r) to[i] = out.at[i];
      }
    }
    if (kShift) {
      Packed<T> sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float add = row0 + r == col0 + c + i ? p.diagonal : 0.0f;
        sum.at[i] = FromFloat<T>(p.scale * ToFloat(out.at[i]) + add);
      }
      StorePacked(shifted + (row0 + r) * order + col0 + c, sum);
    }
  }
  for (int pack = threadIdx.x; kShift && row != col && pack < kMirrorTile * kPacks;
       pack += kThreads) {
    const int c = pack / kPacks;
    const int r = pack % kPacks * 4;
    Packed<T> sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.at[i] = FromFloat<T>(p.scale * ToFloat(tile[c][r + i]));
    StorePacked(shifted + (col0 + c) * order + row0 + r, sum);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) FillKernel(T* to, int64_t count, uint32_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^
                 (static_cast<uint32_t>(i >> 32) + seed) * 2246822519u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    x *= 3266489917u;
    x ^= x >> 16;
    to[i] = FromFloat<T>(static_cast<float>(x >> 8) * (1.0f / 8388608.0f) - 1.0f);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DistanceKernel(const T* a, const T* b, int64_t count, ReductionScratch scratch,
                   double* result) {
  double difference = 0;
  double norm = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const double x = ToFloat(a[i]);
    const double y = ToFloat(b[i]);
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  const double block_difference = BlockSum(difference);
  const double block_norm = BlockSum(norm);
  if (!LeavePartials(scratch, block_difference, block_norm)) return;
  const double all_difference = SumPartials(PartialsOfRow(scratch));
  const double all_norm = SumPartials(PartialsOfRow(scratch) + gridDim.x);
  if (threadIdx.x == 0) {
    result[0] = all_difference;
    result[1] = all_norm;
  }
}

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_MATRIX_KERNELS_CUH_
