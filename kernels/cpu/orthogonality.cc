#include "kernels/cpu/orthogonality.h"

#include <algorithm>
#include <cstring>

namespace dmuon::kernels::cpu {
namespace {

constexpr int64_t kLeast = 8, kMost = 32, kShare = 8;
// Of the longer side: what is sampled of it fits into the second-level cache.
constexpr int64_t kStretch = 1024;
// Of gathered columns, so that they do not lie in the same sets of the cache.
constexpr int64_t kPitch = kStretch + 16;
// Sampled columns of a tall matrix lie in groups of neighbours: each touches a cache line of every row.
constexpr int64_t kNeighbours = 4;

struct Sample {
  int64_t at[kMost];  // positions on the shorter side
  int64_t count;
};

// One group of `neighbours` in each of equal ranges, somewhere in it: a sample that follows no pattern of the weights.
Sample Choose(int64_t m, int64_t neighbours) {
  Sample sample{{}, std::min(m, std::clamp(m / kShare, kLeast, kMost))};
  if (sample.count == m) neighbours = 1;  // all of them, one by one
  sample.count -= sample.count % neighbours;
  const int64_t groups = (sample.count + neighbours - 1) / neighbours;
  uint64_t random = 0x9e3779b97f4a7c15;
  for (int64_t g = 0; g < groups; ++g) {
    random = random * 6364136223846793005 + 1442695040888963407;
    const int64_t begin = g * m / groups, room = (g + 1) * m / groups - begin - neighbours + 1;
    const int64_t first = begin + static_cast<int64_t>(random >> 33) % std::max<int64_t>(room, 1);
    for (int64_t i = g * neighbours; i < std::min((g + 1) * neighbours, sample.count); ++i)
      sample.at[i] = first + i % neighbours;
  }
  return sample;
}

// The sampled columns of `rows` rows, each contiguous.
void GatherColumns(const float* o, int64_t cols, int64_t rows, const Sample& sample, float* to) {
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
  const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
  const Sample sample = Choose(m, tall ? kNeighbours : 1);
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
  const double pairs = 0.5 * static_cast<double>(sample.count * (sample.count - 1));
  return diagonal / static_cast<double>(sample.count) +
         (pairs > 0 ? static_cast<double>(m - 1) * beside / pairs : 0);
}

}  // namespace dmuon::kernels::cpu
