#include "kernels/ops/orthogonality_sample.h"

#include <algorithm>

namespace dmuon::kernels {
namespace {

constexpr int64_t kLeast = 8, kShare = 8;

}  // namespace

// One group of neighbours in each of equal ranges, somewhere in it: a sample that follows no pattern of the weights.
OrthogonalitySample::OrthogonalitySample(int64_t rows, int64_t cols) {
  const int64_t m = std::min(rows, cols);
  int64_t neighbours = rows > cols ? kNeighbours : 1;
  count = std::min(m, std::clamp(m / kShare, kLeast, kMost));
  if (count == m) neighbours = 1;  // all of them, one by one
  count -= count % neighbours;
  const int64_t groups = (count + neighbours - 1) / neighbours;
  uint64_t random = 0x9e3779b97f4a7c15;
  for (int64_t g = 0; g < groups; ++g) {
    random = random * 6364136223846793005 + 1442695040888963407;
    const int64_t begin = g * m / groups, room = (g + 1) * m / groups - begin - neighbours + 1;
    const int64_t first = begin + static_cast<int64_t>(random >> 33) % std::max<int64_t>(room, 1);
    for (int64_t i = g * neighbours; i < std::min((g + 1) * neighbours, count); ++i)
      at[i] = first + i % neighbours;
  }
  const double pairs = 0.5 * static_cast<double>(count * (count - 1));
  on_diagonal = 1 / static_cast<double>(count);
  beside_it = pairs > 0 ? static_cast<double>(m - 1) / pairs : 0;
}

}  // namespace dmuon::kernels
