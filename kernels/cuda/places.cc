#include "kernels/cuda/places.h"

#include <algorithm>

#include "base/checked_math.h"
#include "kernels/ops/block_norm.h"

namespace dmuon::cuda {
namespace {

constexpr int64_t kPad = 64;
constexpr size_t kAlign = 256;

// Of a product that leaves no part of a large device idle for long: four rounds over its multiprocessors, in tiles of 128 x 128.
constexpr int64_t kTile = 128;
constexpr int64_t kEnoughTiles = 512;
// Partial sums of a product; and what cuBLAS itself recommends for Hopper and later.
constexpr int64_t kMostPartials = 16;
constexpr int64_t kMostWorkspace = int64_t{32} << 20;
// What blocks that run at once may take, in bytes of X and of the order x order matrices.
constexpr int64_t kMostBytes = int64_t{256} << 20;

int64_t Padded(int64_t value, int64_t to) {
  return static_cast<int64_t>(AlignUp(static_cast<uint64_t>(value), static_cast<uint64_t>(to)));
}

// How many of `blocks` run at once: all groups but the last are full, and the last nearly.
int64_t Together(const Places& one, int64_t blocks, Element element) {
  constexpr int64_t kMatrices = 6;
  const int64_t tiles = Padded(one.order, kTile) / kTile;
  const int64_t bytes =
      (2 * one.x_elements() + kMatrices * one.buffer_elements()) * ElementBytes(element);
  const int64_t most = std::clamp<int64_t>(
      std::min(kEnoughTiles / (tiles * tiles), kMostBytes / bytes), 1, kMostTogether);
  const int64_t groups = (blocks + most - 1) / most;
  return (blocks + groups - 1) / groups;
}

}  // namespace

Places PlaceBlocks(int64_t rows, int64_t cols, int64_t blocks, Element element) {
  Places p;
  p.wide = rows <= cols;
  p.order = Padded(std::min(rows, cols), kPad);
  p.depth = Padded(std::max(rows, cols), kPad);
  p.shape = {.rows = rows,
             .cols = cols,
             .padded_rows = p.wide ? p.order : p.depth,
             .padded_cols = p.wide ? p.depth : p.order};
  p.together = Together(p, blocks, element);
  const auto bytes = [&](int64_t elements) {
    return AlignUp(static_cast<size_t>(p.together * elements * ElementBytes(element)), kAlign);
  };
  p.x_bytes[0] = p.x_bytes[1] = bytes(p.x_elements());
  p.buffer_bytes = bytes(p.buffer_elements());
  return p;
}

void Arrange(Places& p, const Needs& needs) {
  if (needs.wide_x >= 0) {
    p.x_bytes[needs.wide_x] =
        AlignUp(static_cast<size_t>(p.together * p.x_elements()) * sizeof(float), kAlign);
  }
  p.x[0] = AlignUp(static_cast<size_t>(p.together) * sizeof(kernels::BlockNorm), kAlign);
  p.x[1] = p.x[0] + p.x_bytes[0];
  p.buffers = p.x[1] + p.x_bytes[1];
  p.products = p.buffers + static_cast<size_t>(needs.buffers) * p.buffer_bytes;
  p.groups = needs.groups;
  p.sides = needs.sides;
  // No result is larger than X.
  p.product_stride = AlignUp(ProductWorkspace(p.together * p.x_elements()), kAlign);
  p.bytes = p.products + static_cast<size_t>(p.groups * (1 + p.sides)) * p.product_stride;
}

size_t ProductWorkspace(int64_t results) {
  constexpr auto kPartial = static_cast<int64_t>(sizeof(float));
  return static_cast<size_t>(std::min(kMostWorkspace, kMostPartials * kPartial * results));
}

}  // namespace dmuon::cuda
