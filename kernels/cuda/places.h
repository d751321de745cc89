// Where everything of a run of Newton-Schulz lies in its workspace.
#ifndef DMUON_KERNELS_CUDA_PLACES_H_
#define DMUON_KERNELS_CUDA_PLACES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.h"

namespace dmuon::cuda {

// X is m x n, m <= n. A wide input is stored as it comes, row-major, which cuBLAS reads as the column-major transpose
// Y = X^T (n x m): X X^T = Y^T Y and (Q X)^T = Y Q. A tall input is X^T as it comes, which cuBLAS reads as X itself. So
// nothing is ever transposed. Matrices of one kind lie one behind the other, one of each block.
struct Places {
  bool wide = true;
  int64_t order = 0, depth = 0;                 // padded m and n
  int64_t together = 1;                         // blocks that run at once
  PaddedShape shape;                            // of the input
  size_t x[2] = {}, buffers = 0, products = 0;  // offsets; the Normalizations are at 0
  size_t x_bytes[2] = {}, buffer_bytes = 0;
  size_t product_stride = 0;
  size_t bytes = 0;

  int64_t ld() const { return wide ? depth : order; }  // of X as cuBLAS reads it
  int64_t x_elements() const { return order * depth; }
  int64_t buffer_elements() const { return order * order; }
};

// For up to `blocks` blocks, as many at once as are worth it: products of a large block fill a device by themselves, and
// what runs at once needs its memory at once.
Places PlaceBlocks(int64_t rows, int64_t cols, int64_t blocks, Element element);

struct Needs {
  int buffers = 0;           // of order x order
  int wide_x = -1;           // the X that must hold fp32 as well; -1: neither
  size_t product_bytes = 0;  // a lane's workspace
  int lanes = 0;
};
// Gives everything its offset.
void Arrange(Places& places, const Needs& needs);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_PLACES_H_
