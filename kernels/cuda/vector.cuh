// What the vector kernels share: four elements at a time, tiles that a grid strides over, and sums in a fixed order.
// Device code only, and plain enough to be compiled for the CPU by the tests: nothing here is an intrinsic that the test's
// stand-in lacks.
//
// Which thread takes which element depends on the count alone, never on alignment or on the device, so that sums have the
// same bits everywhere.
#ifndef DMUON_KERNELS_CUDA_VECTOR_CUH_
#define DMUON_KERNELS_CUDA_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "kernels/cuda/launch.h"

namespace dmuon::cuda {

constexpr int kThreads = 256;
constexpr int kQuads =
    4;  // of four elements each, that a thread takes from one tile: loads in flight
constexpr int kTile = kThreads * kQuads * 4;

inline unsigned BlocksFor(int64_t count) {
  const int64_t tiles = (count + kTile - 1) / kTile;
  return static_cast<unsigned>(tiles < 1 ? 1 : tiles < kMaxBlocks ? tiles : kMaxBlocks);
}

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

struct Quad {
  float at[4];
};

// Four elements that memory sees as one access: 16 bytes of fp32, 8 of the 16-bit types. The compiler would copy the 16-bit
// types, which have constructors, one by one; so they pass through plain words.
template <int kBytes>
struct Words;
template <>
struct Words<8> {
  using Type = uint2;
};
template <>
struct Words<16> {
  using Type = uint4;
};

template <typename T>
struct Packed {
  T at[4];
};

template <typename T>
__device__ __forceinline__ Packed<T> LoadPacked(const T* p) {
  const auto words = *reinterpret_cast<const typename Words<4 * sizeof(T)>::Type*>(p);
  Packed<T> packed;
  memcpy(&packed, &words, sizeof(packed));
  return packed;
}

template <typename T>
__device__ __forceinline__ void StorePacked(T* p, const Packed<T>& packed) {
  typename Words<4 * sizeof(T)>::Type words;
  memcpy(&words, &packed, sizeof(packed));
  *reinterpret_cast<typename Words<4 * sizeof(T)>::Type*>(p) = words;
}

// Elements index .. index+3 of p; zeros beyond count.
template <bool kAligned, typename T>
__device__ __forceinline__ Quad LoadQuad(const T* p, int64_t index, int64_t count) {
  Quad q;
  if (kAligned && index + 4 <= count) {
    const Packed<T> packed = LoadPacked(p + index);
#pragma unroll
    for (int i = 0; i < 4; ++i) q.at[i] = ToFloat(packed.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) q.at[i] = index + i < count ? ToFloat(p[index + i]) : 0.0f;
  }
  return q;
}

template <bool kAligned, typename T>
__device__ __forceinline__ void StoreQuad(T* p, int64_t index, int64_t count, const Quad& q) {
  if (kAligned && index + 4 <= count) {
    Packed<T> packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.at[i] = FromFloat<T>(q.at[i]);
    StorePacked(p + index, packed);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (index + i < count) p[index + i] = FromFloat<T>(q.at[i]);
    }
  }
}

// The first element of quad q of this thread in a tile.
__device__ __forceinline__ int64_t QuadIndex(int64_t tile, int q) {
  return tile * kTile + (static_cast<int64_t>(q) * kThreads + threadIdx.x) * 4;
}

// The sum over the block, in thread 0. Every thread must call it; it ends with a barrier, so it may be called again.
__device__ __forceinline__ double BlockSum(double value) {
  __shared__ double warps[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (int w = 0; w < kThreads / 32; ++w) sum += warps[w];
  }
  __syncthreads();
  return sum;
}

__device__ __forceinline__ float BlockMax(float value) {
  __shared__ float warps[kThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float max = 0;
  if (threadIdx.x == 0) {
    for (int w = 0; w < kThreads / 32; ++w) max = fmaxf(max, warps[w]);
  }
  __syncthreads();
  return max;
}

// True in every thread of the block that comes last of its row of the grid, which then finds all that the others of the row
// have written before. The counter orders nothing but who does the final sum: the sum itself runs over the partials in
// their order.
__device__ __forceinline__ bool LastToLeave(unsigned* ticket) {
  ticket += blockIdx.y;
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  const bool mine = last;
  __threadfence();
  return mine;
}

// Where the first value of each block of this row of the grid is; the second of each is gridDim.x further.
__device__ __forceinline__ double* PartialsOfRow(const ReductionScratch& scratch) {
  return scratch.partials + static_cast<int64_t>(blockIdx.y) * 2 * gridDim.x;
}

// Leaves this block's two values there, and tells whether it was the last of its row.
__device__ __forceinline__ bool LeavePartials(const ReductionScratch& scratch, double first,
                                              double second) {
  if (threadIdx.x == 0) {
    double* partials = PartialsOfRow(scratch);
    partials[blockIdx.x] = first;
    partials[gridDim.x + blockIdx.x] = second;
  }
  return LastToLeave(scratch.ticket);
}

// The sum of one column of partials, in thread 0.
__device__ __forceinline__ double SumPartials(const double* partials) {
  double sum = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads)
    sum += *static_cast<const volatile double*>(partials + i);
  return BlockSum(sum);
}

// to = the sum of all threads' squares in this row of the grid; null: nowhere.
__device__ __forceinline__ void LeaveSquareSum(const ReductionScratch& scratch, double squares,
                                               double* to) {
  if (to == nullptr) return;
  const double block = BlockSum(squares);
  if (!LeavePartials(scratch, block, 0)) return;
  const double total = SumPartials(PartialsOfRow(scratch));
  if (threadIdx.x == 0) *to = total;
}

// What one thread has seen of a matrix.
struct Magnitude {
  double squares = 0;
  float largest = 0;

  __device__ __forceinline__ void Add(const Quad& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double value = x.at[i];
      squares += value * value;
      largest = fmaxf(largest, fabsf(x.at[i]));
    }
  }
};

// The norm of the matrix of this row of the grid, from all threads of the row; square_sums may be null.
__device__ __forceinline__ void LeaveNorm(const ReductionScratch& scratch,
                                          const Magnitude& magnitude, kernels::BlockNorm* norms,
                                          double* square_sums) {
  const double squares = BlockSum(magnitude.squares);
  const float largest = BlockMax(magnitude.largest);
  if (!LeavePartials(scratch, squares, largest)) return;
  const double* partials = PartialsOfRow(scratch);
  kernels::BlockNorm norm;
  norm.square_sum = SumPartials(partials);
  float most = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) {
    most = fmaxf(
        most, static_cast<float>(*static_cast<const volatile double*>(partials + gridDim.x + i)));
  }
  norm.largest = BlockMax(most);
  if (threadIdx.x != 0) return;
  norms[blockIdx.y] = norm;
  if (square_sums != nullptr) square_sums[blockIdx.y] = norm.square_sum;
}

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_VECTOR_CUH_
