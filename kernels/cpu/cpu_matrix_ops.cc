#include "kernels/cpu/cpu_matrix_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/cpu/chunks.h"

namespace dmuon::kernels::cpu {
namespace {

constexpr int kTileFloats = kTile * kTile;
constexpr double kNormEpsilon = 1e-7;

struct alignas(64) Tile {
  float values[kTileFloats];
};

void AddToDiagonal(float* tile, int count, float a) {
  for (int i = 0; i < count; ++i) tile[i * (kTile + 1)] += a;
}

// How much of diagonal block i of an m x m matrix is not padding.
int DiagonalIn(int64_t m, int64_t i) {
  return static_cast<int>(std::min<int64_t>(kTile, m - i * kTile));
}

}  // namespace

RunLayout::RunLayout(int64_t rows, int64_t cols, Precision precision, int symmetric_slots,
                     bool apply_in_between)
    : rows(rows),
      cols(cols),
      transposed(rows > cols),
      m(std::min(rows, cols)),
      n(std::max(rows, cols)),
      precision(precision),
      symmetric_slots(symmetric_slots),
      col_buffers(apply_in_between ? 2 : 1) {
  const Dtype x = precision == Precision::kF32 ? Dtype::kF32 : Dtype::kBF16;
  row_panels = {x, BlocksFor(m), BlocksFor(n)};
  col_panels = {x, BlocksFor(n), BlocksFor(m)};
  symmetric = {precision == Precision::kBf16 ? Dtype::kBF16 : Dtype::kF32, BlocksFor(m),
               BlocksFor(m)};
  if (precision == Precision::kMixed) split = {Dtype::kBF16, BlocksFor(m), BlocksFor(m)};
  bytes = row_panels.bytes() + col_buffers * col_panels.bytes() +
          symmetric_slots * symmetric.bytes() + 2 * split.bytes() + BlocksFor(m) * sizeof(double);
}

CpuMatrixOps::CpuMatrixOps(const KernelTable& kernels, ThreadPool& pool, const RunLayout& layout,
                           void* workspace, float* out)
    : kernels_(kernels), pool_(pool), layout_(layout), out_(out) {
  std::byte* next = static_cast<std::byte*>(workspace);
  const auto place = [&next](const PanelShape& shape) {
    const Panels panels{next, shape};
    next += shape.bytes();
    return panels;
  };
  rows_ = place(layout.row_panels);
  for (int i = 0; i < layout.col_buffers; ++i) cols_[i] = place(layout.col_panels);
  for (int i = 0; i < layout.symmetric_slots; ++i) slots_[i] = place(layout.symmetric);
  for (Panels& term : split_) term = place(layout.split);
  parts_ = reinterpret_cast<double*>(next);
}

BlockNorm CpuMatrixOps::NormOf(const float* in) const {
  BlockNorm norm;
  SumInChunks(
      pool_, 1, layout_.rows * layout_.cols,
      [&](int64_t, int64_t from, int64_t count) { return NormOfChunk(kernels_, in + from, count); },
      [&](int64_t, const BlockNorm& chunk) { Add(chunk, norm); });
  return norm;
}

CpuMatrixOps::Scale CpuMatrixOps::ScaleFor(const BlockNorm& norm) {
  if (norm.square_sum == 0) return {0, 0, true};
  // U / mx / (||U / mx|| + 1e-7) = U * power * rest, so that nothing leaves the range of fp32 on the way. Squares of
  // any fp32 fit in float64, so the norm needs no scaling by mx.
  const double scale = 1 / (std::sqrt(norm.square_sum) + kNormEpsilon * norm.largest);
  int exponent;
  std::frexp(norm.largest, &exponent);
  const double power = std::ldexp(1.0, std::clamp(-exponent, -126, 126));
  return {static_cast<float>(power), static_cast<float>(scale / power), false};
}

bool CpuMatrixOps::Load(const float* in, const BlockNorm& norm) {
  const Scale scale = ScaleFor(norm);
  if (scale.zero) return false;
  const int64_t row_blocks = BlocksFor(layout_.rows), col_blocks = BlocksFor(layout_.cols);
  constexpr int64_t kBlocksPerPiece = 8;
  const int64_t pieces_per_row = (col_blocks + kBlocksPerPiece - 1) / kBlocksPerPiece;
  pool_.Run(row_blocks * pieces_per_row, [&](int64_t piece) {
    const int64_t i = piece / pieces_per_row;
    const int64_t first = piece % pieces_per_row * kBlocksPerPiece;
    for (int64_t j = first; j < std::min(first + kBlocksPerPiece, col_blocks); ++j) {
      Tile tile, transposed;
      kernels_.load_tile(in + i * kTile * layout_.cols + j * kTile, layout_.cols,
                         static_cast<int>(std::min<int64_t>(kTile, layout_.rows - i * kTile)),
                         static_cast<int>(std::min<int64_t>(kTile, layout_.cols - j * kTile)),
                         scale.power, scale.rest, tile.values);
      kernels_.transpose(tile.values, transposed.values);
      if (layout_.transposed) {
        PackTile(j, i, transposed.values, tile.values);
      } else {
        PackTile(i, j, tile.values, transposed.values);
      }
    }
  });
  return true;
}

void CpuMatrixOps::PackTile(int64_t i, int64_t j, const float* tile, const float* transposed) {
  if (layout_.row_panels.dtype == Dtype::kF32) {
    std::memcpy(cols_[0].f32(i, j), tile, sizeof(Tile));
    std::memcpy(rows_.f32(j, i), transposed, sizeof(Tile));
  } else {
    kernels_.pack_bf16(tile, cols_[0].bf16(i, j));
    kernels_.pack_bf16(transposed, rows_.bf16(j, i));
  }
}

void CpuMatrixOps::Combine(const float* tile, float alpha, const Panels& e, int64_t i, int64_t j,
                           float beta, float* to) const {
  if (e.shape.dtype == Dtype::kF32) {
    kernels_.combine_f32(tile, alpha, e.f32(i, j), beta, to);
  } else {
    kernels_.combine_bf16(tile, alpha, e.bf16(i, j), beta, to);
  }
}

void CpuMatrixOps::StoreSymmetric(const Panels& to, int64_t i, int64_t j, float* tile) const {
  Tile mirrored;
  kernels_.transpose(tile, mirrored.values);
  if (i == j) {
    // The lower left was not computed (product.h); the rest is symmetric but for rounding, and made so.
    constexpr int kHalf = kTile / 2;
    for (int row = 0; row < kHalf; ++row) {
      std::memcpy(mirrored.values + row * kTile + kHalf, tile + row * kTile + kHalf,
                  kHalf * sizeof(float));
      std::memcpy(tile + (kHalf + row) * kTile, mirrored.values + (kHalf + row) * kTile,
                  kHalf * sizeof(float));
    }
    kernels_.combine_f32(tile, 0.5f, mirrored.values, 0.5f, tile);
  }
  if (to.shape.dtype == Dtype::kF32) {
    std::memcpy(to.f32(i, j), tile, sizeof(Tile));
    if (i != j) std::memcpy(to.f32(j, i), mirrored.values, sizeof(Tile));
  } else {
    kernels_.pack_bf16(tile, to.bf16(i, j));
    if (i != j) kernels_.pack_bf16(mirrored.values, to.bf16(j, i));
  }
}

void CpuMatrixOps::Gram(int r) {
  Product product;
  product.terms[0] = {rows_, rows_};
  product.symmetric = true;
  RunProduct(kernels_, pool_, product,
             [&](int64_t i, int64_t j, float* tile) { StoreSymmetric(slots_[r], i, j, tile); });
  if (layout_.precision == Precision::kMixed) MeasureGram(r);
}

void CpuMatrixOps::MeasureGram(int r) {
  const PanelShape& shape = layout_.symmetric;
  pool_.Run(shape.panels, [&](int64_t j) {
    float magnitude;
    kernels_.norm(slots_[r].f32(0, j), shape.blocks * kTileFloats, &parts_[j], &magnitude);
  });
  double square_sum = 0;
  for (int64_t j = 0; j < shape.panels; ++j) square_sum += parts_[j];
  gram_norm_ = std::sqrt(square_sum);
}

void CpuMatrixOps::Multiply(int out, double alpha, int left, int right, double beta, int e) {
  // In the last step an error only changes the polynomial a little. In an earlier one R would take part of it, and what
  // is not symmetric in it grows from step to step where X has small singular values.
  if (layout_.precision == Precision::kMixed && steps_left_ == 1)
    return MultiplyRounded(out, alpha, left, right, beta, e);
  Product product;
  product.terms[0] = {slots_[left], slots_[right]};
  product.symmetric = true;
  RunProduct(kernels_, pool_, product, [&](int64_t i, int64_t j, float* tile) {
    Combine(tile, static_cast<float>(alpha), slots_[e], i, j, static_cast<float>(beta), tile);
    StoreSymmetric(slots_[out], i, j, tile);
  });
}

// With L = l I + L' and R = r I + R', only L' R' is left to bf16: L R = L' R' + r L + l R - l r I.
void CpuMatrixOps::MultiplyRounded(int out, double alpha, int left, int right, double beta, int e) {
  const float l = MeanOfDiagonal(left), r = MeanOfDiagonal(right);
  RoundShifted(left, l, split_[0]);
  if (left != right) RoundShifted(right, r, split_[1]);
  Product product;
  product.terms[0] = {split_[0], left == right ? split_[0] : split_[1]};
  product.symmetric = true;
  const float scale = static_cast<float>(alpha);
  RunProduct(kernels_, pool_, product, [&](int64_t i, int64_t j, float* tile) {
    Combine(tile, scale, slots_[e], i, j, static_cast<float>(beta), tile);
    Combine(tile, 1, slots_[left], i, j, scale * r, tile);
    Combine(tile, 1, slots_[right], i, j, scale * l, tile);
    if (i == j) AddToDiagonal(tile, DiagonalIn(layout_.m, i), -scale * l * r);
    StoreSymmetric(slots_[out], i, j, tile);
  });
}

float CpuMatrixOps::MeanOfDiagonal(int slot) const {
  double trace = 0;
  for (int64_t i = 0; i < layout_.m; ++i) {
    trace += slots_[slot].f32(i / kTile, i / kTile)[i % kTile * (kTile + 1)];
  }
  return static_cast<float>(trace / static_cast<double>(layout_.m));
}

void CpuMatrixOps::RoundShifted(int slot, float shift, const Panels& to) {
  pool_.Run(to.shape.panels, [&](int64_t j) {
    for (int64_t i = 0; i < to.shape.blocks; ++i) {
      if (i != j) {
        kernels_.pack_bf16(slots_[slot].f32(i, j), to.bf16(i, j));
        continue;
      }
      Tile tile;
      std::memcpy(tile.values, slots_[slot].f32(i, j), sizeof(tile));
      AddToDiagonal(tile.values, DiagonalIn(layout_.m, i), -shift);
      kernels_.pack_bf16(tile.values, to.bf16(i, j));
    }
  });
}

void CpuMatrixOps::AddIdentity(int out, int z, double a) {
  // The identity goes on over the padding, where every other matrix is zero.
  const PanelShape& shape = layout_.symmetric;
  pool_.Run(shape.panels, [&](int64_t j) {
    std::memcpy(slots_[out].panel(j), slots_[z].panel(j), shape.blocks * shape.block_bytes());
    AddToDiagonal(slots_[out].f32(j, j), kTile, static_cast<float>(a));
  });
}

// Q in one bf16 term, as long as what that loses is no worse than the rounding of X itself.
//
// Where spectra decay fast, Q has large values for the small singular values of X and small ones for the large; rounding
// errors of the large act on the large singular values of X too. Most of Q is then its diagonal, near the mean of all
// values: the mean goes apart, exactly, and that alone takes the errors down by the square root of m. What the rounding
// of the others loses, E, is known; E X has a top singular value of about 2 max_j ||E_j|| sigma_1(X) at most, since E is
// noise, and sigma_1(X)^2 <= ||X X^T||_F. Beyond a limit the rest of Q, E in bf16, is applied as well. Not a number: too.
CpuMatrixOps::Split CpuMatrixOps::SplitForApply(int q) {
  // The top singular value was seen to rise by a tenth of the estimate; bf16 is allowed 0.2.
  constexpr double kLimit = 0.75;
  const PanelShape& shape = layout_.symmetric;
  const float shift = MeanOfDiagonal(q);
  pool_.Run(shape.panels, [&](int64_t j) {
    AddToDiagonal(slots_[q].f32(j, j), kTile, -shift);
    alignas(64) float lost[kTile] = {};
    for (int64_t i = 0; i < shape.blocks; ++i) {
      kernels_.split_bf16(slots_[q].f32(i, j), split_[0].bf16(i, j), split_[1].bf16(i, j), lost);
    }
    parts_[j] = *std::max_element(lost, lost + DiagonalIn(layout_.m, j));
  });
  const double lost = std::sqrt(*std::max_element(parts_, parts_ + shape.panels));
  return {shift, 2 * lost * std::sqrt(gram_norm_) <= kLimit ? 1 : 2};
}

void CpuMatrixOps::StoreOutput(int64_t i, int64_t j, const float* tile) const {
  Tile transposed;
  if (layout_.transposed) {
    kernels_.transpose(tile, transposed.values);
    tile = transposed.values;
    std::swap(i, j);
  }
  kernels_.store_tile(tile, out_ + i * kTile * layout_.cols + j * kTile, layout_.cols,
                      static_cast<int>(std::min<int64_t>(kTile, layout_.rows - i * kTile)),
                      static_cast<int>(std::min<int64_t>(kTile, layout_.cols - j * kTile)));
}

void CpuMatrixOps::Apply(int q, double a, bool last) {
  Product product;
  product.terms[0] = {slots_[q], cols_[0]};
  if (layout_.precision == Precision::kMixed) {
    const Split split = SplitForApply(q);
    a += split.shift;
    product.terms[0] = {split_[0], cols_[0]};
    product.terms[1] = {split_[1], cols_[0]};
    product.term_count = split.terms;
  }
  const Panels old = cols_[0];
  if (!last) std::swap(cols_[0], cols_[1]);
  RunProduct(kernels_, pool_, product, [&](int64_t i, int64_t j, float* tile) {
    if (a != 0) Combine(tile, 1, old, i, j, static_cast<float>(a), tile);
    if (last) {
      StoreOutput(i, j, tile);
    } else {
      Tile transposed;
      kernels_.transpose(tile, transposed.values);
      PackTile(i, j, tile, transposed.values);
    }
  });
}

}  // namespace dmuon::kernels::cpu
