// How far a matrix is from orthogonal, estimated from a sample.
#ifndef DMUON_KERNELS_CPU_ORTHOGONALITY_H_
#define DMUON_KERNELS_CPU_ORTHOGONALITY_H_

#include <cstdint>

#include "kernels/cpu/kernel_table.h"

namespace dmuon::kernels::cpu {

// An estimate of ||O O^T - I||_F^2 / m for a dense rows x cols matrix O of m = rows <= cols; O^T O for a tall one
// (kernels/ops/orthogonality_sample.h). On the calling thread.
double SampledOrthogonality(const KernelTable& kernels, const float* o, int64_t rows, int64_t cols);

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_ORTHOGONALITY_H_
