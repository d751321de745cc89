#include "tests/benchmark/peak.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <chrono>

namespace dmuon {
namespace {

constexpr int kIterations = 400000;
constexpr int kSums = 12;  // enough for the latency of two units, few enough for 16 registers

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#if defined(__x86_64__)

__attribute__((target("avx512f"))) double Avx512() {
  __m512 c[kSums], x = _mm512_set1_ps(0.5f);
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) c[i] = x;
  const double start = Seconds();
  for (int k = 0; k < kIterations; ++k) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      c[i] = _mm512_fmadd_ps(x, x, c[i]);
      asm volatile("" : "+v"(c[i]));
    }
  }
  return 32.0 * kSums * kIterations / (Seconds() - start);
}

__attribute__((target("avx512f,avx512bf16"))) double Avx512Bf16() {
  __m512 c[kSums];
  __m512i x = _mm512_set1_epi32(0x3f003f00);
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) c[i] = _mm512_set1_ps(0.5f);
  const double start = Seconds();
  for (int k = 0; k < kIterations; ++k) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      c[i] = _mm512_dpbf16_ps(c[i], (__m512bh)x, (__m512bh)x);
      asm volatile("" : "+v"(c[i]));
    }
  }
  return 64.0 * kSums * kIterations / (Seconds() - start);
}

__attribute__((target("avx2,fma"))) double Avx2() {
  __m256 c[kSums], x = _mm256_set1_ps(0.5f);
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) c[i] = x;
  const double start = Seconds();
  for (int k = 0; k < kIterations; ++k) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      c[i] = _mm256_fmadd_ps(x, x, c[i]);
      asm volatile("" : "+v"(c[i]));
    }
  }
  return 16.0 * kSums * kIterations / (Seconds() - start);
}

#endif

}  // namespace

double PeakFlops(const std::string& kernel, bool bf16) {
#if defined(__x86_64__)
  if (bf16) return kernel == "avx512_bf16" ? Avx512Bf16() : 0;
  if (kernel == "avx512_bf16" || kernel == "avx512") return Avx512();
  if (kernel == "avx2") return Avx2();
#endif
  return 0;
}

}  // namespace dmuon
