// AVX2 and FMA: 8-wide vectors, 16 registers.
#include <immintrin.h>

#include "kernels/cpu/generic_kernels.h"

namespace dmuon::kernels::cpu {
namespace {

// A register tile is 4 x 16: 8 sums are as many as the two units' latency needs, and both operands' loads stay under
// what the units can take.
void MultiplyF32(const KernelTable::MultiplyArgs& args) {
  for (int j = 0; j < kTile; j += 16) {
    const int end = args.upper && j == 0 ? kTile / 2 : kTile;
    for (int i = 0; i < end; i += 4) {
      const float* left = static_cast<const float*>(args.a) + i;
      const float* right = static_cast<const float*>(args.b) + j;
      __m256 c[4][2];
#pragma GCC unroll 4
      for (int row = 0; row < 4; ++row) c[row][0] = c[row][1] = _mm256_setzero_ps();
      for (int64_t k = 0; k < args.packed_rows; ++k, left += kTile, right += kTile) {
        const __m256 r0 = _mm256_load_ps(right), r1 = _mm256_load_ps(right + 8);
#pragma GCC unroll 4
        for (int row = 0; row < 4; ++row) {
          const __m256 x = _mm256_broadcast_ss(left + row);
          c[row][0] = _mm256_fmadd_ps(x, r0, c[row][0]);
          c[row][1] = _mm256_fmadd_ps(x, r1, c[row][1]);
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < 4; ++row) {
        float* to = args.acc + (i + row) * kTile + j;
        if (args.add) {
          c[row][0] = _mm256_add_ps(c[row][0], _mm256_load_ps(to));
          c[row][1] = _mm256_add_ps(c[row][1], _mm256_load_ps(to + 8));
        }
        _mm256_store_ps(to, c[row][0]);
        _mm256_store_ps(to + 8, c[row][1]);
      }
    }
  }
}

// 8 x 8 at a time.
void Transpose(const float* from, float* to) {
  for (int i = 0; i < kTile; i += 8) {
    for (int j = 0; j < kTile; j += 8) {
      __m256 r[8], s[8];
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) r[k] = _mm256_load_ps(from + (i + k) * kTile + j);
#pragma GCC unroll 4
      for (int k = 0; k < 8; k += 2) {
        s[k] = _mm256_unpacklo_ps(r[k], r[k + 1]);
        s[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
      }
#pragma GCC unroll 2
      for (int k = 0; k < 8; k += 4) {
        r[k] = _mm256_shuffle_ps(s[k], s[k + 2], 0x44);
        r[k + 1] = _mm256_shuffle_ps(s[k], s[k + 2], 0xee);
        r[k + 2] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0x44);
        r[k + 3] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0xee);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        _mm256_store_ps(to + (j + k) * kTile + i, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
        _mm256_store_ps(to + (j + k + 4) * kTile + i, _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
      }
    }
  }
}

constexpr KernelTable kTable = MakeTable("avx2", /*bf16_units=*/false, MultiplyF32,
                                         EmulatedMultiplyBf16<MultiplyF32>, Transpose);

}  // namespace

const KernelTable& Avx2Kernels() { return kTable; }

}  // namespace dmuon::kernels::cpu
