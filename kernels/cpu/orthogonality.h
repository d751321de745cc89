// How far a matrix is from orthogonal, estimated from a sample.
#ifndef DMUON_KERNELS_CPU_ORTHOGONALITY_H_
#define DMUON_KERNELS_CPU_ORTHOGONALITY_H_

#include <cstdint>

#include "kernels/cpu/kernel_table.h"

namespace dmuon::kernels::cpu {

// An estimate of ||O O^T - I||_F^2 / m for a dense rows x cols matrix O of m = rows <= cols; O^T O for a tall one.
//
// From the products of k of its m rows with each other, k = m / 8 but at least 8 and at most 32 (all m below 8): the mean
// of (o_i o_i - 1)^2, and (m - 1) times the mean of (o_i o_j)^2. That is k^2 n FLOPs beside the 6 to 15 m^2 n of what made O.
// The same rows each time, on the calling thread.
double SampledOrthogonality(const KernelTable& kernels, const float* o, int64_t rows, int64_t cols);

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_ORTHOGONALITY_H_
