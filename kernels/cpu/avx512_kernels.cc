// AVX-512 (F, BW, DQ, VL): 16-wide vectors, 32 registers.
#include "kernels/cpu/avx512_tiles.h"

namespace dmuon::kernels::cpu {
namespace {

constexpr KernelTable kTable = {
    .name = "avx512",
    .bf16_units = false,
    .multiply_f32 = MultiplyF32,
    .multiply_bf16 = EmulatedMultiplyBf16<MultiplyF32>,
    .transpose = Transpose,
    .combine_f32 = GenericCombineF32,
    .combine_bf16 = GenericCombineBf16,
    .pack_bf16 = GenericPackBf16,
    .split_bf16 = GenericSplitBf16,
    .load_tile = GenericLoadTile,
    .store_tile = GenericStoreTile,
    .norm = GenericNorm,
    .mean = GenericMean,
    .lookahead = GenericLookahead,
    .muon_commit = GenericMuonCommit,
    .adamw = GenericAdamw,
    .publish = GenericPublish,
};

}  // namespace

const KernelTable& Avx512Kernels() { return kTable; }

}  // namespace dmuon::kernels::cpu
