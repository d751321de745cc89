// A Newton-Schulz iteration as a list of matrix operations, recorded once when a plan is made (the iteration does not depend
// on the data): which buffer each operation reads and writes, at which power of two a buffer is kept, and which operations
// may run beside the others.
//
// Why powers of two: with ||X||_F = 1 the entries of X are near 1/sqrt(mn) and those of X X^T near 1/(m sqrt(n)), 6e-5 and
// 7e-7 at 8192 x 28672, where fp16 has few bits left or none (its smallest normal number is 6.1e-5). So a buffer holds
// 2^exponent times its matrix. The factors go into alpha and beta of the products, which are exact, and cost nothing.
#ifndef DMUON_KERNELS_CUDA_PROGRAM_H_
#define DMUON_KERNELS_CUDA_PROGRAM_H_

#include <vector>

#include "absl/types/span.h"
#include "kernels/newton_schulz/newton_schulz.h"

namespace dmuon::cuda {

struct Operation {
  enum class Kind {
    kGram,  // out = alpha X X^T
    kMultiply,  // out = alpha left right + beta e; and shifted = scale out + diagonal I, when there is one
    kApply,  // the other X = alpha left X + beta X
  };
  Kind kind = Kind::kMultiply;
  int out = -1, left = -1, right = -1, e = -1;  // buffers of order x order
  int shifted = -1;
  double alpha = 1, beta = 0, scale = 1, diagonal = 0;
  int x = 0;           // kGram, kApply: which of the two X buffers is read
  bool aside = false;  // runs on the second stream: later operations than the next have need of it
  std::vector<int> wait_for;  // earlier operations of the other stream that must be done
  bool waited_for = false;
};

struct Program {
  std::vector<Operation> operations;  // the last is the kApply whose result is the output
  int buffers = 0;                    // of order x order
  int x_exponent = 0;                 // X is kept as 2^x_exponent X
};

// REQUIRES: form is what will run. `restarts` is read for kGram only. rows, cols: of X, for its exponent.
Program RecordProgram(kernels::NsForm form, absl::Span<const kernels::Coefficients> schedule,
                      absl::Span<const int> restarts, int64_t rows, int64_t cols);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_PROGRAM_H_
