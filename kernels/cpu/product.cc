#include "kernels/cpu/product.h"

#include <algorithm>

namespace dmuon::kernels::cpu {
namespace {

// A stretch of 128 packed rows of a panel is 16 KiB: one of the left and one of the right stay in the first-level
// cache while a tile is computed, and those of a macro tile with its sums in the second.
constexpr int64_t kStretch = 128;
constexpr int kMaxMacro = 4;
constexpr int kTileFloats = kTile * kTile;

struct MacroTile {
  int64_t row, col;    // first tile
  int64_t rows, cols;  // tiles
};

// Macro tiles of a product, in the order in which they are started: whole ones first.
class MacroTiles {
 public:
  MacroTiles(int64_t rows, int64_t cols, bool symmetric, int64_t edge)
      : rows_(rows),
        cols_(cols),
        edge_(edge),
        symmetric_(symmetric),
        grid_rows_((rows + edge - 1) / edge),
        grid_cols_((cols + edge - 1) / edge) {}

  int64_t count() const {
    return symmetric_ ? grid_cols_ * (grid_cols_ + 1) / 2 : grid_rows_ * grid_cols_;
  }

  MacroTile at(int64_t index) const {
    int64_t i, j;
    if (!symmetric_) {
      i = index % grid_rows_, j = index / grid_rows_;
    } else if (const int64_t off_diagonal = grid_cols_ * (grid_cols_ - 1) / 2;
               index < off_diagonal) {
      j = 1;
      for (; index >= j; ++j) index -= j;
      i = index;
    } else {
      i = j = index - off_diagonal;  // half the work: last, to even out the end
    }
    return {i * edge_, j * edge_, std::min(edge_, rows_ - i * edge_),
            std::min(edge_, cols_ - j * edge_)};
  }

 private:
  int64_t rows_, cols_, edge_;
  bool symmetric_;
  int64_t grid_rows_, grid_cols_;
};

// The largest edge that still leaves every thread several pieces.
int64_t EdgeFor(const Product& product, int64_t rows, int64_t cols, int threads) {
  constexpr int kPiecesPerThread = 8;
  int64_t edge = kMaxMacro;
  if (threads == 1) return edge;
  while (edge > 1 &&
         MacroTiles(rows, cols, product.symmetric, edge).count() < kPiecesPerThread * threads)
    edge /= 2;
  return edge;
}

void RunMacroTile(const KernelTable& kernels, const Product& product, const MacroTile& macro,
                  absl::FunctionRef<void(int64_t, int64_t, float*)> finish) {
  alignas(64) float sums[kMaxMacro * kMaxMacro][kTileFloats];
  const PanelShape& shape = product.terms[0].left.shape;
  const auto multiply = shape.dtype == Dtype::kF32 ? kernels.multiply_f32 : kernels.multiply_bf16;
  const int64_t packed_rows = shape.packed_rows();
  for (int t = 0; t < product.term_count; ++t) {
    const auto& [left, right] = product.terms[t];
    for (int64_t k = 0; k < packed_rows; k += kStretch) {
      const int64_t stretch = std::min(kStretch, packed_rows - k);
      const bool first = t == 0 && k == 0;
      const bool last = t + 1 == product.term_count && k + stretch == packed_rows;
      for (int64_t i = 0; i < macro.rows; ++i) {
        const int64_t from =
            product.symmetric ? std::max<int64_t>(0, macro.row + i - macro.col) : 0;
        for (int64_t j = from; j < macro.cols; ++j) {
          float* sum = sums[i * kMaxMacro + j];
          multiply(left.panel(macro.row + i) + k * kPackedRowBytes,
                   right.panel(macro.col + j) + k * kPackedRowBytes, stretch, sum, !first);
          if (last) finish(macro.row + i, macro.col + j, sum);
        }
      }
    }
  }
}

}  // namespace

void RunProduct(const KernelTable& kernels, ThreadPool& pool, const Product& product,
                absl::FunctionRef<void(int64_t, int64_t, float*)> finish) {
  const int64_t rows = product.terms[0].left.shape.panels,
                cols = product.terms[0].right.shape.panels;
  const MacroTiles tiles(rows, cols, product.symmetric,
                         EdgeFor(product, rows, cols, pool.threads()));
  pool.Run(tiles.count(),
           [&](int64_t index) { RunMacroTile(kernels, product, tiles.at(index), finish); });
}

}  // namespace dmuon::kernels::cpu
