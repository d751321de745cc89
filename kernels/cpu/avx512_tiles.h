// Tiles in AVX-512, for the two files that use it (see generic_kernels.h for the unnamed namespace).
#ifndef DMUON_KERNELS_CPU_AVX512_TILES_H_
#define DMUON_KERNELS_CPU_AVX512_TILES_H_

#include <immintrin.h>

#include "kernels/cpu/generic_kernels.h"

namespace dmuon::kernels::cpu {
namespace {

struct F32Step {
  using Vec = __m512;
  static Vec Load(const void* from) { return _mm512_load_ps(from); }
  static Vec Broadcast(const void* from) {
    return _mm512_set1_ps(*static_cast<const float*>(from));
  }
  static __m512 MultiplyAdd(__m512 c, Vec a, Vec b) { return _mm512_fmadd_ps(a, b, c); }
};

// kRows x 16 kVecs of the tile, from row `i` and column `j` on. A packed row is 32 elements of 4 bytes for either dtype,
// so both share the loop.
template <typename Step, int kRows, int kVecs>
__attribute__((always_inline)) inline void MultiplyPart(const KernelTable::MultiplyArgs& args,
                                                        int i, int j, const char*& ahead) {
  const char* left = static_cast<const char*>(args.a) + i * 4;
  const char* right = static_cast<const char*>(args.b) + j * 4;
  __m512 c[kRows][kVecs];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) c[row][v] = _mm512_setzero_ps();
  }
  const auto step = [&]() __attribute__((always_inline)) {
    typename Step::Vec r[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) r[v] = Step::Load(right + 64 * v);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const typename Step::Vec x = Step::Broadcast(left + row * 4);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) c[row][v] = Step::MultiplyAdd(c[row][v], x, r[v]);
    }
    left += kPackedRowBytes;
    right += kPackedRowBytes;
  };
  int64_t k = 0;
  if (ahead != nullptr) {
    for (; k + 4 <= args.packed_rows; k += 4, ahead += 64) {
      _mm_prefetch(ahead, _MM_HINT_T1);
      step();
      step();
      step();
      step();
    }
  }
  for (; k < args.packed_rows; ++k) step();
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      float* to = args.acc + (i + row) * kTile + j + 16 * v;
      if (args.add) c[row][v] = _mm512_add_ps(c[row][v], _mm512_load_ps(to));
      _mm512_store_ps(to, c[row][v]);
    }
  }
}

// 8 x 32 at a time: 16 sums cover the latency of two units twice, and 10 loads go with 16 multiply-adds.
template <typename Step>
inline void Multiply(const KernelTable::MultiplyArgs& args) {
  const char* ahead = static_cast<const char*>(args.ahead);
  for (int i = 0; i < kTile / 2; i += 8) MultiplyPart<Step, 8, 2>(args, i, 0, ahead);
  if (args.upper) {
    MultiplyPart<Step, 16, 1>(args, 16, 16, ahead);
  } else {
    for (int i = kTile / 2; i < kTile; i += 8) MultiplyPart<Step, 8, 2>(args, i, 0, ahead);
  }
}

inline void MultiplyF32(const KernelTable::MultiplyArgs& args) { Multiply<F32Step>(args); }

// 16 x 16 at a time: pairs, quads, then 128-bit lanes in two steps.
inline void Transpose(const float* from, float* to) {
  for (int i = 0; i < kTile; i += 16) {
    for (int j = 0; j < kTile; j += 16) {
      __m512 r[16], s[16];
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k) r[k] = _mm512_load_ps(from + (i + k) * kTile + j);
#pragma GCC unroll 8
      for (int k = 0; k < 16; k += 2) {
        s[k] = _mm512_unpacklo_ps(r[k], r[k + 1]);
        s[k + 1] = _mm512_unpackhi_ps(r[k], r[k + 1]);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 16; k += 4) {
        r[k] = _mm512_shuffle_ps(s[k], s[k + 2], 0x44);
        r[k + 1] = _mm512_shuffle_ps(s[k], s[k + 2], 0xee);
        r[k + 2] = _mm512_shuffle_ps(s[k + 1], s[k + 3], 0x44);
        r[k + 3] = _mm512_shuffle_ps(s[k + 1], s[k + 3], 0xee);
      }
      // r[4 q + c] holds, in lane l, column 4 l + c of rows 4 q .. 4 q + 3.
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const __m512 low01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x44);
        const __m512 high01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xee);
        const __m512 low23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x44);
        const __m512 high23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xee);
        _mm512_store_ps(to + (j + c) * kTile + i, _mm512_shuffle_f32x4(low01, low23, 0x88));
        _mm512_store_ps(to + (j + 4 + c) * kTile + i, _mm512_shuffle_f32x4(low01, low23, 0xdd));
        _mm512_store_ps(to + (j + 8 + c) * kTile + i, _mm512_shuffle_f32x4(high01, high23, 0x88));
        _mm512_store_ps(to + (j + 12 + c) * kTile + i, _mm512_shuffle_f32x4(high01, high23, 0xdd));
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_AVX512_TILES_H_
