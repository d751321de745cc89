// Any processor: 16-byte vectors, which are in the baseline of every 64-bit one.
#include "kernels/cpu/generic_kernels.h"

namespace dmuon::kernels::cpu {
namespace {

typedef float Vec __attribute__((vector_size(16)));
constexpr int kRows = 4, kVecs = 2, kWidth = 4;  // a register tile is 4 x 8

void MultiplyF32(const KernelTable::MultiplyArgs& args) {
  for (int i = 0; i < kTile; i += kRows) {
    const int first = args.upper && i >= kTile / 2 ? kTile / 2 : 0;
    for (int j = first; j < kTile; j += kVecs * kWidth) {
      const float* left = static_cast<const float*>(args.a) + i;
      const float* right = static_cast<const float*>(args.b) + j;
      Vec c[kRows][kVecs] = {};
      for (int64_t k = 0; k < args.packed_rows; ++k, left += kTile, right += kTile) {
        Vec r[kVecs];
        __builtin_memcpy(r, right, sizeof(r));
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const float x = left[row];
          c[row][0] += r[0] * x;
          c[row][1] += r[1] * x;
        }
      }
      for (int row = 0; row < kRows; ++row) {
        float* to = args.acc + (i + row) * kTile + j;
        Vec old[kVecs] = {};
        if (args.add) __builtin_memcpy(old, to, sizeof(old));
        for (int v = 0; v < kVecs; ++v) c[row][v] += old[v];
        __builtin_memcpy(to, c[row], sizeof(old));
      }
    }
  }
}

constexpr KernelTable kTable = MakeTable("portable", /*bf16_units=*/false, MultiplyF32,
                                         EmulatedMultiplyBf16<MultiplyF32>, GenericTranspose);

}  // namespace

const KernelTable& PortableKernels() { return kTable; }

}  // namespace dmuon::kernels::cpu
