// Where everything of a run of Newton-Schulz lies in its workspace. Free of CUDA's headers: a plan is known without a device.
#ifndef DMUON_KERNELS_CUDA_PLACES_H_
#define DMUON_KERNELS_CUDA_PLACES_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/shapes.h"

namespace dmuon::cuda {

// Streams beside the main one, over which the parts of a product are spread.
constexpr int kSideLanes = 3;
// Products that may run beside each other.
constexpr int kLaneGroups = 2;
constexpr int64_t kSmallestPart = 256;  // rows of a part; below it a product is all latency

// X is m x n, m <= n. A wide input is stored as it comes, row-major, which cuBLAS reads as the column-major transpose
// Y = X^T (n x m): X X^T = Y^T Y and (Q X)^T = Y Q. A tall input is X^T as it comes, which cuBLAS reads as X itself. So
// nothing is ever transposed. Matrices of one kind lie one behind the other, one of each block.
struct Places {
  bool wide = true;
  int64_t order = 0, depth = 0;                 // padded m and n
  int64_t together = 1;                         // blocks that run at once
  PaddedShape shape;                            // of the input
  size_t x[2] = {}, buffers = 0, products = 0;  // offsets; norms are at 0
  size_t x_bytes[2] = {}, buffer_bytes = 0;
  int groups = 1, sides = 0;  // of the lanes that products run on, each with a workspace
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
  int buffers = 0;  // of order x order
  int wide_x = -1;  // the X that must hold fp32 as well; -1: neither
  int groups = 1, sides = 0;
};
// Gives everything its offset.
void Arrange(Places& places, const Needs& needs);

// The most that a product may ask for whose result has so many elements: it keeps partial sums there, in fp32. What it does
// ask for depends on the algorithm, which is chosen by timing; so that a plan is known before that, the most is set aside.
size_t ProductWorkspace(int64_t results);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_PLACES_H_
