// What Newton-Schulz begins with. Free of Abseil, because the CUDA compiler reads it.
#ifndef DMUON_KERNELS_OPS_BLOCK_NORM_H_
#define DMUON_KERNELS_OPS_BLOCK_NORM_H_

namespace dmuon::kernels {

// Of a block of U, in the backend's memory.
struct BlockNorm {
  double square_sum = 0;  // ||U||_F^2
  double largest = 0;     // max |U|
};

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_OPS_BLOCK_NORM_H_
