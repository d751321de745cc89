#include "kernels/cpu/product.h"

#include <algorithm>
#include <atomic>

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

// One stretch of a macro tile's operands.
struct Stretch {
  MacroTile macro;
  const Product::Term* term = nullptr;  // null: there is none
  int64_t offset = 0;                   // bytes into each panel
  int64_t packed_rows = 0;
};

Stretch StretchAt(const Product& product, const MacroTile& macro, int64_t index) {
  const int64_t packed_rows = product.terms[0].left.shape.packed_rows();
  const int64_t each = (packed_rows + kStretch - 1) / kStretch;
  if (index >= each * product.term_count) return {};
  const int64_t k = index % each * kStretch;
  return {macro, &product.terms[index / each], k * kPackedRowBytes,
          std::min(kStretch, packed_rows - k)};
}

// Where the `piece`th half of one of the stretch's panels lies: each tile's multiplication fetches one ahead.
const void* HalfOf(const Stretch& stretch, int64_t piece) {
  const auto& [macro, term, offset, packed_rows] = stretch;
  if (term == nullptr || piece >= 2 * (macro.rows + macro.cols)) return nullptr;
  const int64_t panel = piece / 2;
  const std::byte* start = panel < macro.rows ? term->left.panel(macro.row + panel)
                                              : term->right.panel(macro.col + panel - macro.rows);
  return start + offset + piece % 2 * packed_rows * kPackedRowBytes / 2;
}

// `likely_next` is asked late: which macro tile this thread may take after this one.
void RunMacroTile(const KernelTable& kernels, const Product& product, const MacroTile& macro,
                  absl::FunctionRef<Stretch()> likely_next,
                  absl::FunctionRef<void(int64_t, int64_t, float*)> finish) {
  alignas(64) float sums[kMaxMacro * kMaxMacro][kTileFloats];
  const auto multiply = product.terms[0].left.shape.dtype == Dtype::kF32 ? kernels.multiply_f32
                                                                         : kernels.multiply_bf16;
  Stretch next = StretchAt(product, macro, 0);
  bool last = false;
  for (int64_t s = 0; !last; ++s) {
    const Stretch stretch = next;
    next = StretchAt(product, macro, s + 1);
    last = next.term == nullptr;
    if (last) next = likely_next();
    int64_t piece = 0;
    for (int64_t i = 0; i < macro.rows; ++i) {
      const int64_t from = product.symmetric ? std::max<int64_t>(0, macro.row + i - macro.col) : 0;
      for (int64_t j = from; j < macro.cols; ++j) {
        float* sum = sums[i * kMaxMacro + j];
        multiply({.a = stretch.term->left.panel(macro.row + i) + stretch.offset,
                  .b = stretch.term->right.panel(macro.col + j) + stretch.offset,
                  .packed_rows = stretch.packed_rows,
                  .acc = sum,
                  .add = s > 0,
                  .upper = product.symmetric && macro.row + i == macro.col + j,
                  .ahead = HalfOf(next, piece++)});
        if (last) finish(macro.row + i, macro.col + j, sum);
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
  std::atomic<int64_t> started{0};  // pieces are started in order
  const auto likely_next = [&]() -> Stretch {
    const int64_t index = started.load(std::memory_order_relaxed);
    return index < tiles.count() ? StretchAt(product, tiles.at(index), 0) : Stretch();
  };
  pool.Run(tiles.count(), [&](int64_t index) {
    started.fetch_add(1, std::memory_order_relaxed);
    RunMacroTile(kernels, product, tiles.at(index), likely_next, finish);
  });
}

}  // namespace dmuon::kernels::cpu
