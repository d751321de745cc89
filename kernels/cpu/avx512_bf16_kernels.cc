// AVX-512 with the bf16 dot product: two bf16 products and their sum in fp32 a lane.
#include "kernels/cpu/avx512_tiles.h"

namespace dmuon::kernels::cpu {
namespace {

struct Bf16Step {
  using Vec = __m512i;
  static Vec Load(const void* from) { return _mm512_load_si512(from); }
  static Vec Broadcast(const void* from) {
    int pair;
    __builtin_memcpy(&pair, from, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static __m512 MultiplyAdd(__m512 c, Vec a, Vec b) {
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
  }
};

void MultiplyBf16(const KernelTable::MultiplyArgs& args) { Multiply<Bf16Step>(args); }

constexpr KernelTable kTable =
    MakeTable("avx512_bf16", /*bf16_units=*/true, MultiplyF32, MultiplyBf16, Transpose);

}  // namespace

const KernelTable& Avx512Bf16Kernels() { return kTable; }

}  // namespace dmuon::kernels::cpu
