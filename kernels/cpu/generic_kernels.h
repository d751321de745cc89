// The inner loops in plain C++, for the compiler to vectorise with the flags of the file that includes this.
//
// Everything is in an unnamed namespace on purpose: each including file gets its own copy, compiled for its own
// instruction set. Contraction to FMA is off in these files, so that all instruction sets round alike; where a fused
// multiply-add is meant it is written out.
#ifndef DMUON_KERNELS_CPU_GENERIC_KERNELS_H_
#define DMUON_KERNELS_CPU_GENERIC_KERNELS_H_

#include <cstdint>

#include "kernels/cpu/kernel_table.h"

namespace dmuon::kernels::cpu {
namespace {

constexpr int kLanes = 16;

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// x rounded to bf16, nearest even, in the upper half; a NaN stays one (quiet).
inline uint32_t RoundedToBf16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return x == x ? rounded : (bits | 0x00400000u);
}

inline float FromBf16(uint16_t x) { return FloatOf(static_cast<uint32_t>(x) << 16); }

// fp16 to and from fp32 by integer arithmetic; all branches are selects, so it vectorises.
inline float FromF16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t magnitude = x & 0x7fff;
  // 2^112 moves the exponent bias from 15 to 127, for subnormals too.
  const float scaled = FloatOf(magnitude << 13) * 0x1p112f;
  const uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000u | (magnitude << 13) : BitsOf(scaled);
  return FloatOf(bits | sign);
}

inline uint16_t ToF16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // Below 2^-14: adding 0.5 puts the quantum 2^-24 at the last mantissa bit, and the addition rounds to nearest even.
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5f) - BitsOf(0.5f);
  const uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00 : half;  // 65520 and above
  half = magnitude > 0x7f800000u ? 0x7e00 : half;
  return static_cast<uint16_t>(half | sign);
}

// ---------------------------------------------------------------------------------------------------------- tiles

inline void GenericTranspose(const float* from, float* to) {
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < kTile; ++j) to[j * kTile + i] = from[i * kTile + j];
  }
}

inline void GenericCombineF32(const float* __restrict acc, float alpha, const float* e, float beta,
                              float* to) {
  for (int i = 0; i < kTile * kTile; ++i) to[i] = alpha * acc[i] + beta * e[i];
}

inline void GenericCombineBf16(const float* __restrict acc, float alpha,
                               const uint16_t* __restrict e, float beta, float* to) {
  for (int i = 0; i < kTile; i += 2) {
    for (int j = 0; j < kTile; ++j) {
      uint32_t pair;
      __builtin_memcpy(&pair, e + i * kTile + 2 * j, sizeof(pair));
      to[i * kTile + j] = alpha * acc[i * kTile + j] + beta * FloatOf(pair << 16);
      to[(i + 1) * kTile + j] =
          alpha * acc[(i + 1) * kTile + j] + beta * FloatOf(pair & 0xffff0000u);
    }
  }
}

inline void GenericPackBf16(const float* __restrict tile, uint16_t* __restrict block) {
  for (int i = 0; i < kTile; i += 2) {
    for (int j = 0; j < kTile; ++j) {
      const uint32_t low = RoundedToBf16(tile[i * kTile + j]) >> 16;
      const uint32_t high = RoundedToBf16(tile[(i + 1) * kTile + j]) & 0xffff0000u;
      const uint32_t pair = low | high;
      __builtin_memcpy(block + i * kTile + 2 * j, &pair, sizeof(pair));
    }
  }
}

inline float RestAfterBf16(float x) { return x - FloatOf(RoundedToBf16(x) & 0xffff0000u); }

inline void GenericSplitBf16(const float* __restrict tile, uint16_t* __restrict block,
                             uint16_t* __restrict rest_block, float* __restrict lost) {
  alignas(64) float rest[kTile * kTile];
  for (int i = 0; i < kTile * kTile; ++i) rest[i] = RestAfterBf16(tile[i]);
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < kTile; ++j) lost[j] += rest[i * kTile + j] * rest[i * kTile + j];
  }
  GenericPackBf16(tile, block);
  if (rest_block != nullptr) GenericPackBf16(rest, rest_block);
}

inline void GenericLoadTile(const float* from, int64_t stride, int rows, int cols, float s1,
                            float s2, float* __restrict tile) {
  constexpr int kTilesAhead = 3;
  if (cols == kTile) {
    for (int i = 0; i < rows; ++i) {
      // The tiles to the right come next; their rows are too far apart for the processor to see it.
      __builtin_prefetch(from + i * stride + kTilesAhead * kTile);
      __builtin_prefetch(from + i * stride + kTilesAhead * kTile + kTile / 2);
      for (int j = 0; j < kTile; ++j) tile[i * kTile + j] = from[i * stride + j] * s1 * s2;
    }
  } else {
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < cols; ++j) tile[i * kTile + j] = from[i * stride + j] * s1 * s2;
      for (int j = cols; j < kTile; ++j) tile[i * kTile + j] = 0;
    }
  }
  for (int i = rows * kTile; i < kTile * kTile; ++i) tile[i] = 0;
}

inline void GenericStoreTile(const float* __restrict tile, float* to, int64_t stride, int rows,
                             int cols) {
  if (cols == kTile) {
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < kTile; ++j) to[i * stride + j] = tile[i * kTile + j];
    }
    return;
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < cols; ++j) to[i * stride + j] = tile[i * kTile + j];
  }
}

// bf16 products on a processor without units for them: unpack to fp32, a stretch at a time.
template <KernelTable::Multiply kMultiplyF32>
void EmulatedMultiplyBf16(const KernelTable::MultiplyArgs& args) {
  constexpr int kStretch = 32;
  alignas(64) float unpacked[2][2 * kStretch * kTile];
  const void* const sides[2] = {args.a, args.b};
  for (int64_t start = 0; start < args.packed_rows; start += kStretch) {
    const int64_t left = args.packed_rows - start;
    const int64_t rows = left < kStretch ? left : kStretch;
    for (int side = 0; side < 2; ++side) {
      const uint16_t* from = static_cast<const uint16_t*>(sides[side]) + start * 2 * kTile;
      for (int64_t k = 0; k < rows; ++k) {
        for (int j = 0; j < kTile; ++j) {
          const uint16_t* pair = from + (k * kTile + j) * 2;
          unpacked[side][2 * k * kTile + j] = FromBf16(pair[0]);
          unpacked[side][(2 * k + 1) * kTile + j] = FromBf16(pair[1]);
        }
      }
    }
    kMultiplyF32({.a = unpacked[0],
                  .b = unpacked[1],
                  .packed_rows = 2 * rows,
                  .acc = args.acc,
                  .add = args.add || start > 0,
                  .upper = args.upper});
  }
}

// -------------------------------------------------------------------------------------------------------- vectors

// Vectors of the registers' own size: wider ones the compiler keeps in memory.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// 16 lanes in as many vectors as it takes. Element i of what is added goes to lane i mod 16, and the lanes are summed in
// a fixed tree, whatever the instruction set.
template <typename T>
struct Lanes {
  static constexpr int kEach = kVectorBytes / sizeof(T), kVectors = kLanes / kEach;
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  typedef float Narrow __attribute__((vector_size(kEach * sizeof(float))));
  Vector vectors[kVectors] = {};

  // += a b, by elements.
  void AddProducts(const float* a, const float* b) {
    for (int v = 0; v < kVectors; ++v) {
      Narrow left, right;
      __builtin_memcpy(&left, a + v * kEach, sizeof(left));
      __builtin_memcpy(&right, b + v * kEach, sizeof(right));
      vectors[v] += __builtin_convertvector(left, Vector) * __builtin_convertvector(right, Vector);
    }
  }
  // The same for any count; all calls but the last have count % 16 == 0.
  void AddProducts(const float* a, const float* b, int64_t count) {
    Lanes sums = *this;  // in registers
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sums.AddProducts(a + i, b + i);
    if (i < count) {
      float left[kLanes] = {}, right[kLanes] = {};
      __builtin_memcpy(left, a + i, static_cast<size_t>(count - i) * sizeof(float));
      __builtin_memcpy(right, b + i, static_cast<size_t>(count - i) * sizeof(float));
      sums.AddProducts(left, right);
    }
    *this = sums;
  }
  double Total() const {
    T sums[kLanes];
    __builtin_memcpy(sums, vectors, sizeof(sums));
    for (int width = kLanes / 2; width >= 1; width /= 2) {
      for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    }
    return sums[0];
  }
};

// The square of a float is exact in double, but for the ends of its range.
struct SquareSum {
  Lanes<double> lanes;
  void Add(const float* x, int64_t count) { lanes.AddProducts(x, x, count); }
  double Total() const { return lanes.Total(); }
};

// Four at once: one alone would wait for its sum from one addition to the next.
inline void GenericDot4(const float* a, const float* const* b, int64_t count, double* sums) {
  Lanes<float> lanes[4];
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int k = 0; k < 4; ++k) lanes[k].AddProducts(a + i, b[k] + i);
  }
  for (int k = 0; k < 4; ++k) {
    if (i < count) lanes[k].AddProducts(a + i, b[k] + i, count - i);
    sums[k] += lanes[k].Total();
  }
}

inline void GenericNorm(const float* x, int64_t count, double* square_sum, float* magnitude) {
  constexpr int64_t kStretch = 1024;
  SquareSum squares;
  uint32_t largest = 0;  // floats without their sign compare like integers
  for (int64_t start = 0; start < count; start += kStretch) {
    const int64_t n = count - start < kStretch ? count - start : kStretch;
    squares.Add(x + start, n);
    for (int64_t i = start; i < start + n; ++i) {
      const uint32_t bits = BitsOf(x[i]) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
  }
  *square_sum = squares.Total();
  *magnitude = FloatOf(largest);
}

template <typename T, float (*kConvert)(T)>
inline void AddInput(const void* input, int64_t offset, int64_t count, bool first,
                     float* __restrict sum) {
  const T* x = static_cast<const T*>(input) + offset;
  if (first) {
    for (int64_t i = 0; i < count; ++i) sum[i] = kConvert(x[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) sum[i] += kConvert(x[i]);
  }
}

inline float Same(float x) { return x; }

inline double GenericMean(const void* const* inputs, int64_t input_count, Dtype dtype,
                          int64_t offset, int64_t count, float divisor, bool accumulate,
                          float* mean) {
  constexpr int64_t kStretch = 512;  // the sum over ranks stays in the first-level cache
  alignas(64) float sum[kStretch];
  SquareSum squares;
  for (int64_t start = 0; start < count; start += kStretch) {
    const int64_t n = count - start < kStretch ? count - start : kStretch;
    for (int64_t r = 0; r < input_count; ++r) {
      if (dtype == Dtype::kF32) {
        AddInput<float, Same>(inputs[r], offset + start, n, r == 0, sum);
      } else if (dtype == Dtype::kBF16) {
        AddInput<uint16_t, FromBf16>(inputs[r], offset + start, n, r == 0, sum);
      } else {
        AddInput<uint16_t, FromF16>(inputs[r], offset + start, n, r == 0, sum);
      }
    }
    if (input_count == 0) {
      for (int64_t i = 0; i < n; ++i) sum[i] = 0;
    }
    float* out = mean + start;
    if (accumulate) {
      for (int64_t i = 0; i < n; ++i) out[i] = out[i] + sum[i] / divisor;
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = sum[i] / divisor;
    }
    squares.Add(out, n);
  }
  return squares.Total();
}

inline void GenericLookahead(const float* momentum, const float* gradient, float* update,
                             int64_t count, float mu, float clip, bool nesterov) {
  if (nesterov) {
    for (int64_t i = 0; i < count; ++i) {
      const float g = clip * gradient[i];
      const float m = mu * momentum[i] + g;
      update[i] = g + mu * m;
    }
  } else {
    for (int64_t i = 0; i < count; ++i) update[i] = mu * momentum[i] + clip * gradient[i];
  }
}

inline double GenericMuonCommit(float* momentum, const float* gradient, float* weight,
                                const float* orthogonal, int64_t count, float mu, float clip,
                                float keep, float scale) {
  constexpr int64_t kStretch =
      512;  // of the orthogonal matrix, in the first-level cache for its squares
  Lanes<float> squares;
  for (int64_t start = 0; start < count; start += kStretch) {
    const int64_t n = count - start < kStretch ? count - start : kStretch;
    for (int64_t i = start; i < start + n; ++i) {
      momentum[i] = mu * momentum[i] + clip * gradient[i];
      weight[i] = weight[i] * keep - scale * orthogonal[i];
    }
    squares.AddProducts(orthogonal + start, orthogonal + start, n);
  }
  return squares.Total();
}

// In torch's order of operations and with its fused ones (its single-tensor AdamW): decay, lerp, mul + addcmul, sqrt /
// correction + eps, addcdiv. Moments have torch's bits; weights too, but for its square root that is off by one ulp on
// a fifth of all values.
inline void GenericAdamw(float* weight, float* exp_avg, float* exp_avg_sq, const float* gradient,
                         int64_t count, const AdamwScalars& s) {
  // lerp takes the form that is exact at the nearer end.
  const bool near_start = __builtin_fabsf(s.beta1_weight) < 0.5f;
  const float lerp_weight = near_start ? s.beta1_weight : s.beta1_weight - 1;
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i];
    const float m = __builtin_fmaf(lerp_weight, g - exp_avg[i], near_start ? exp_avg[i] : g);
    const float v = __builtin_fmaf(s.beta2_weight * g, g, exp_avg_sq[i] * s.beta2);
    const float denominator = __builtin_sqrtf(v) / s.correction2_sqrt + s.eps;
    weight[i] = weight[i] * s.keep + s.minus_step_size * m / denominator;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
  }
}

inline void GenericPublish(const float* from, Dtype dtype, void* to, int64_t count) {
  if (dtype == Dtype::kF32) {
    float* out = static_cast<float*>(to);
    for (int64_t i = 0; i < count; ++i) out[i] = from[i];
  } else if (dtype == Dtype::kBF16) {
    uint16_t* out = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < count; ++i)
      out[i] = static_cast<uint16_t>(RoundedToBf16(from[i]) >> 16);
  } else {
    uint16_t* out = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < count; ++i) out[i] = ToF16(from[i]);
  }
}

// ------------------------------------------------------------------------------------------------------- the table

// The products and the transpose are an instruction set's own; the rest are the loops above, as the including file's
// flags compile them.
constexpr KernelTable MakeTable(const char* name, bool bf16_units,
                                KernelTable::Multiply multiply_f32,
                                KernelTable::Multiply multiply_bf16,
                                void (*transpose)(const float* from, float* to)) {
  return {
      .name = name,
      .bf16_units = bf16_units,
      .multiply_f32 = multiply_f32,
      .multiply_bf16 = multiply_bf16,
      .transpose = transpose,
      .combine_f32 = GenericCombineF32,
      .combine_bf16 = GenericCombineBf16,
      .pack_bf16 = GenericPackBf16,
      .split_bf16 = GenericSplitBf16,
      .load_tile = GenericLoadTile,
      .store_tile = GenericStoreTile,
      .norm = GenericNorm,
      .mean = GenericMean,
      .dot4 = GenericDot4,
      .lookahead = GenericLookahead,
      .muon_commit = GenericMuonCommit,
      .adamw = GenericAdamw,
      .publish = GenericPublish,
  };
}

}  // namespace
}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_GENERIC_KERNELS_H_
