// The kernel of a step that only telemetry asks for: how far a result of Newton-Schulz is from orthogonal.
#ifndef DMUON_KERNELS_CUDA_MEASURE_KERNELS_CUH_
#define DMUON_KERNELS_CUDA_MEASURE_KERNELS_CUH_

#include "kernels/cuda/vector.cuh"

namespace dmuon::cuda {

// Sampled rows are taken four at a time: a block of threads has the 16 products of two such groups, on its part of the longer
// side. Eight groups make 36 pairs: with that many blocks for each part there is work for a whole device, and every element of
// the sample is read nine times, from the cache.
constexpr int kGroup = kernels::OrthogonalitySample::kNeighbours;
constexpr int kProducts = kGroup * kGroup;
constexpr int kParts = 4;
constexpr int kMostGroups = kernels::OrthogonalitySample::kMost / kGroup;
static_assert(kMostGroups * (kMostGroups + 1) / 2 * kParts * kProducts <= kMaxPartials,
              "the products do not fit into the scratch");

// Pairs (first, second) of groups, first <= second, numbered along the triangle.
struct GroupPair {
  int first = 0, second = 0;
};
__device__ __forceinline__ GroupPair PairAt(int number) {
  GroupPair pair;
  while (number > pair.second) number -= ++pair.second;
  pair.first = number;
  return pair;
}

inline unsigned OrthogonalityBlocks(const kernels::OrthogonalitySample& sample) {
  const auto groups = static_cast<unsigned>((sample.count + kGroup - 1) / kGroup);
  return groups * (groups + 1) / 2 * kParts;
}

// square_errors = on_diagonal sum_i (g_ii - 1)^2 + beside_it sum_{i<j} g_ij^2, all in float64. A row of the grid for each
// block.
template <bool kTall>
__global__ void __launch_bounds__(kThreads)
    OrthogonalityKernel(const __grid_constant__ OrthogonalityParams p) {
  const int part = blockIdx.x % kParts;
  const GroupPair pair = PairAt(blockIdx.x / kParts);
  const int count = static_cast<int>(p.sample.count);
  const float* matrix = p.matrix + p.blocks.at[blockIdx.y];
  double* partials = p.scratch.partials + static_cast<int64_t>(blockIdx.y) * gridDim.x * kProducts;
  const int64_t length = kTall ? p.rows : p.cols;
  const int64_t step = kTall ? p.cols : 1;
  // Beyond the sample its last row stands in; what comes of that is left out of the sum.
  const float* rows[2][kGroup];
#pragma unroll
  for (int i = 0; i < 2 * kGroup; ++i) {
    const int wanted = (i < kGroup ? pair.first : pair.second) * kGroup + i % kGroup;
    const int64_t at = p.sample.at[wanted < count ? wanted : count - 1];
    rows[i / kGroup][i % kGroup] = matrix + (kTall ? at : at * p.cols);
  }
  double products[kProducts] = {};
  for (int64_t k = part * kThreads + threadIdx.x; k < length; k += kParts * kThreads) {
    float values[2][kGroup];
#pragma unroll
    for (int i = 0; i < 2 * kGroup; ++i)
      values[i / kGroup][i % kGroup] = rows[i / kGroup][i % kGroup][k * step];
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      products[i] +=
          static_cast<double>(values[0][i / kGroup]) * static_cast<double>(values[1][i % kGroup]);
    }
  }
  __shared__ double warps[kThreads / 32][kProducts];
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      products[i] += __shfl_xor_sync(0xffffffffu, products[i], offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32][i] = products[i];
  }
  __syncthreads();
  if (threadIdx.x < kProducts) {
    double sum = 0;
    for (int w = 0; w < kThreads / 32; ++w) sum += warps[w][threadIdx.x];
    partials[blockIdx.x * kProducts + threadIdx.x] = sum;
  }
  if (!LastToLeave(p.scratch.ticket)) return;

  double error = 0;
  for (int number = threadIdx.x; number < static_cast<int>(gridDim.x) / kParts * kProducts;
       number += kThreads) {
    const GroupPair of = PairAt(number / kProducts);
    const int i = of.first * kGroup + number % kProducts / kGroup;
    const int j = of.second * kGroup + number % kGroup;
    if (i > j || j >= count) continue;
    double product = 0;
    for (int s = 0; s < kParts; ++s) {
      product += *static_cast<const volatile double*>(
          partials + (number / kProducts * kParts + s) * kProducts + number % kProducts);
    }
    error += i == j ? p.sample.on_diagonal * (product - 1) * (product - 1)
                    : p.sample.beside_it * product * product;
  }
  const double sum = BlockSum(error);
  if (threadIdx.x == 0) p.square_errors[blockIdx.y] = sum;
}

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_MEASURE_KERNELS_CUH_
