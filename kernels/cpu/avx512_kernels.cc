// AVX-512 (F, BW, DQ, VL): 16-wide vectors, 32 registers.
#include "kernels/cpu/avx512_tiles.h"

namespace dmuon::kernels::cpu {
namespace {

constexpr KernelTable kTable = MakeTable("avx512", /*bf16_units=*/false, MultiplyF32,
                                         EmulatedMultiplyBf16<MultiplyF32>, Transpose);

}  // namespace

const KernelTable& Avx512Kernels() { return kTable; }

}  // namespace dmuon::kernels::cpu
