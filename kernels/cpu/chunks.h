// Vector operations in chunks of a fixed size: the threads share them, and what they give is added in their order, so that
// the bits of a sum depend on nothing but the count.
#ifndef DMUON_KERNELS_CPU_CHUNKS_H_
#define DMUON_KERNELS_CPU_CHUNKS_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/backend.h"

namespace dmuon::kernels::cpu {

constexpr int64_t kChunk = 1 << 15;  // elements

inline int64_t ChunksIn(int64_t count) { return (count + kChunk - 1) / kChunk; }

// body(block, from, count) for each chunk of each of `blocks` blocks of `count` elements, on the pool; add(block, what it
// gave) for each, in order.
template <typename Body, typename Add>
void SumInChunks(ThreadPool& pool, int64_t blocks, int64_t count, const Body& body,
                 const Add& add) {
  constexpr int64_t kAtOnce = 256;
  const int64_t in_a_block = ChunksIn(count), all = blocks * in_a_block;
  for (int64_t first = 0; first < all; first += kAtOnce) {
    std::invoke_result_t<Body, int64_t, int64_t, int64_t> given[kAtOnce];
    const int64_t now = std::min(kAtOnce, all - first);
    pool.Run(now, [&](int64_t i) {
      const int64_t from = (first + i) % in_a_block * kChunk;
      given[i] = body((first + i) / in_a_block, from, std::min(kChunk, count - from));
    });
    for (int64_t i = 0; i < now; ++i) add((first + i) / in_a_block, given[i]);
  }
}

inline BlockNorm NormOfChunk(const KernelTable& kernels, const float* x, int64_t count) {
  BlockNorm norm;
  float largest = 0;
  kernels.norm(x, count, &norm.square_sum, &largest);
  norm.largest = largest;
  return norm;
}

inline void Add(const BlockNorm& chunk, BlockNorm& norm) {
  norm.square_sum += chunk.square_sum;
  norm.largest = std::max(norm.largest, chunk.largest);
}

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_CHUNKS_H_
