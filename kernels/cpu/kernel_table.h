// What one instruction set contributes: the inner loops over tiles and over vectors, as plain functions.
//
// Each table is compiled in its own file with its own flags, and chosen at run time by CPUID. Those files include
// nothing with inline functions that others share, so no code for a foreign processor leaks through the linker.
#ifndef DMUON_KERNELS_CPU_KERNEL_TABLE_H_
#define DMUON_KERNELS_CPU_KERNEL_TABLE_H_

#include <cstdint>

#include "kernels/ops/dtype.h"

namespace dmuon::kernels::cpu {

// Matrices are packed in panels 32 columns wide: panel J holds columns 32 J .. 32 J + 31 as consecutive packed rows of
// 128 bytes. In fp32 a packed row is one row (k) of 32 floats; in bf16 it is two rows (2k, 2k + 1) interleaved, which
// is what the dot-product instruction wants. 32 rows of a panel are a block: 4 KiB in fp32, 2 KiB in bf16.
inline constexpr int kTile = 32;
inline constexpr int kPackedRowBytes = 128;

// One AdamW step's scalars, rounded to fp32 where torch rounds them.
struct AdamwScalars {
  float keep;          // 1 - lr * weight_decay
  float beta1_weight;  // 1 - beta1
  float beta2;
  float beta2_weight;      // 1 - beta2
  float correction2_sqrt;  // sqrt(1 - beta2^step)
  float eps;
  float minus_step_size;  // - lr / (1 - beta1^step)
};

struct KernelTable {
  const char* name;
  bool bf16_units;  // bf16 products run at twice the speed of fp32 ones

  // acc (32 x 32, row-major) = [acc +] sum over packed rows k of a[k][i] b[k][j].
  struct MultiplyArgs {
    const void* a = nullptr;
    const void* b = nullptr;
    int64_t packed_rows = 0;
    float* acc = nullptr;
    bool add = false;    // keep what acc holds
    bool upper = false;  // the lower left 16 x 16 are not wanted, and may be left as they are
    const void* ahead = nullptr;  // fetch 64 bytes a packed row from here towards the cache
  };
  using Multiply = void (*)(const MultiplyArgs& args);
  Multiply multiply_f32;
  Multiply multiply_bf16;

  // Tiles are 32 x 32 row-major floats, 64-byte aligned, as are fp32 blocks; bf16 blocks have their pairs interleaved.
  void (*transpose)(const float* from, float* to);
  void (*combine_f32)(const float* acc, float alpha, const float* e, float beta, float* to);
  void (*combine_bf16)(const float* acc, float alpha, const uint16_t* e, float beta, float* to);
  void (*pack_bf16)(const float* tile, uint16_t* block);
  // block = tile rounded to bf16; rest_block, if not null, what that lost, itself rounded; and the squares of what was
  // lost are added to each of 32 columns' lost[j].
  void (*split_bf16)(const float* tile, uint16_t* block, uint16_t* rest_block, float* lost);
  // tile = from (rows x cols of it, the rest zero) * s1 * s2.
  void (*load_tile)(const float* from, int64_t stride, int rows, int cols, float s1, float s2,
                    float* tile);
  void (*store_tile)(const float* tile, float* to, int64_t stride, int rows, int cols);

  // Vector operations on one chunk. Sums run in 16 lanes and a fixed tree in every table.
  void (*norm)(const float* x, int64_t count, double* square_sum, float* magnitude);
  double (*mean)(const void* const* inputs, int64_t input_count, Dtype dtype, int64_t offset,
                 int64_t count, float divisor, bool accumulate, float* mean);
  // sums[k] += a b[k], for k of 4; each product in fp32 lanes.
  void (*dot4)(const float* a, const float* const* b, int64_t count, double* sums);
  void (*lookahead)(const float* momentum, const float* gradient, float* update, int64_t count,
                    float mu, float clip, bool nesterov);
  // Returns the sum of squares of `orthogonal`, in fp32 lanes: its elements are about 1 and below.
  double (*muon_commit)(float* momentum, const float* gradient, float* weight,
                        const float* orthogonal, int64_t count, float mu, float clip, float keep,
                        float scale);
  void (*adamw)(float* weight, float* exp_avg, float* exp_avg_sq, const float* gradient,
                int64_t count, const AdamwScalars& scalars);
  void (*publish)(const float* from, Dtype dtype, void* to, int64_t count);
};

const KernelTable& PortableKernels();
const KernelTable& Avx2Kernels();
const KernelTable& Avx512Kernels();
const KernelTable& Avx512Bf16Kernels();

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_KERNEL_TABLE_H_
