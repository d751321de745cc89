#include "kernels/cpu/orthogonality.h"

#include <algorithm>
#include <cstring>

#include "kernels/ops/orthogonality_sample.h"

namespace dmuon::kernels::cpu {
namespace {

// Of the longer side: what is sampled of it fits into the second-level cache.
constexpr int64_t kStretch = 1024;
// Of gathered columns, so that they do not lie in the same sets of the cache.
constexpr int64_t kPitch = kStretch + 16;
constexpr int64_t kNeighbours = OrthogonalitySample::kNeighbours;
constexpr int64_t kMost = OrthogonalitySample::kMost;

// The sampled columns of `rows` rows, each contiguous.
void GatherColumns(const float* o, int64_t cols, int64_t rows, const OrthogonalitySample& sample,
                   float* to) {
  typedef float Four __attribute__((vector_size(16)));
  for (int64_t i = 0; i < sample.count; i += kNeighbours) {
    const float* from = o + sample.at[i];
    float* column = to + i * kPitch;
    int64_t k = 0;
    for (; sample.count % kNeighbours == 0 && k + 4 <= rows; k += 4) {
      Four row[4];
      for (int r = 0; r < 4; ++r) std::memcpy(&row[r], from + (k + r) * cols, sizeof(Four));
      const Four low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
      const Four low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
      const Four high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
      const Four high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
      const Four columns[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5),
                               __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                               __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                               __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
      for (int c = 0; c < 4; ++c) std::memcpy(column + c * kPitch + k, &columns[c], sizeof(Four));
    }
    for (; k < rows; ++k) {
      for (int64_t c = i; c < std::min(i + kNeighbours, sample.count); ++c)
        to[c * kPitch + k] = o[k * cols + sample.at[c]];
    }
  }
}

}  // namespace

double SampledOrthogonality(const KernelTable& kernels, const float* o, int64_t rows,
                            int64_t cols) {
  const bool tall = rows > cols;
  const int64_t n = std::max(rows, cols);
  const OrthogonalitySample sample(rows, cols);
  double gram[kMost][kMost + 3] = {};  // rows of four at a time
  alignas(64) float gathered[kMost * kPitch];
  const float* at[kMost + 3];
  for (int64_t start = 0; start < n; start += kStretch) {
    const int64_t length = std::min(kStretch, n - start);
    for (int64_t i = 0; i < sample.count; ++i)
      at[i] = tall ? gathered + i * kPitch : o + sample.at[i] * cols + start;
    std::fill_n(at + sample.count, 3, at[0]);
    if (tall) GatherColumns(o + start * cols, cols, length, sample, gathered);
    for (int64_t i = 0; i < sample.count; ++i) {
      for (int64_t j = i; j < sample.count; j += 4)
        kernels.dot4(at[i], at + j, length, gram[i] + j);
    }
  }
  double diagonal = 0, beside = 0;
  for (int64_t i = 0; i < sample.count; ++i) {
    diagonal += (gram[i][i] - 1) * (gram[i][i] - 1);
    for (int64_t j = i + 1; j < sample.count; ++j) beside += gram[i][j] * gram[i][j];
  }
  return sample.on_diagonal * diagonal + sample.beside_it * beside;
}

}  // namespace dmuon::kernels::cpu
