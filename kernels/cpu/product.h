// One matrix product over packed panels, cut into tiles: each tile's value depends on nothing but its operands, so the
// result has the same bits for any number of threads.
#ifndef DMUON_KERNELS_CPU_PRODUCT_H_
#define DMUON_KERNELS_CPU_PRODUCT_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/panels.h"
#include "kernels/cpu/thread_pool.h"

namespace dmuon::kernels::cpu {

struct Product {
  // The sum over terms of left^T right; the second term is optional. Tile (I, J) needs panel I of left and J of right.
  struct Term {
    Panels left, right;
  };
  Term terms[2];
  int term_count = 1;
  bool symmetric = false;  // only tiles with I <= J; of I == J all but the lower left 16 x 16
};

// Calls finish(I, J, tile) with each finished 32 x 32 tile; it may overwrite the tile. Tiles come in no order, from
// several threads.
void RunProduct(const KernelTable& kernels, ThreadPool& pool, const Product& product,
                absl::FunctionRef<void(int64_t, int64_t, float*)> finish);

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_PRODUCT_H_
