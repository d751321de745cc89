// The matrix operations of the iteration on packed panels (kernels/newton_schulz/iteration.h), for one run.
#ifndef DMUON_KERNELS_CPU_CPU_MATRIX_OPS_H_
#define DMUON_KERNELS_CPU_CPU_MATRIX_OPS_H_

#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/panels.h"
#include "kernels/cpu/product.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/newton_schulz/iteration.h"

namespace dmuon::kernels::cpu {

// What precision X and the m x m matrices have.
enum class Precision {
  kF32,    // both fp32
  kMixed,  // X bf16, m x m fp32
  kBf16,   // both bf16
};

// Sizes and places of one run's matrices; made once for a plan.
struct RunLayout {
  RunLayout(int64_t rows, int64_t cols, Precision precision, int symmetric_slots,
            bool apply_in_between);

  int64_t rows, cols;  // as the caller sees the matrix
  bool transposed;     // X is its transpose
  int64_t m, n;        // X
  Precision precision;
  int symmetric_slots;
  PanelShape row_panels;  // X^T: panel I holds rows 32 I .. of X
  PanelShape col_panels;  // X: panel J holds columns 32 J .. of X
  PanelShape symmetric;
  PanelShape split;  // a slot rounded to bf16 for Apply, and what that lost: mixed only
  int col_buffers;   // 2 where X is rewritten between products
  size_t bytes;
};

class CpuMatrixOps final : public MatrixOps {
 public:
  CpuMatrixOps(const KernelTable& kernels, ThreadPool& pool, const RunLayout& layout,
               void* workspace, float* out);

  // The norm of a matrix of this layout.
  BlockNorm NormOf(const float* in) const;
  // Packs `in`, scaled to Frobenius norm 1. False for an all-zero matrix: nothing is packed then.
  bool Load(const float* in, const BlockNorm& norm);

  void BeginStep(int step, int steps) override { steps_left_ = steps - step; }
  void Gram(int r) override;
  void Multiply(int out, double alpha, int left, int right, double beta, int e) override;
  void AddIdentity(int out, int z, double a) override;
  void Apply(int q, double a, bool last) override;

 private:
  struct Scale {
    float power, rest;  // multiplied one after the other: the first is a power of two
    bool zero;
  };
  static Scale ScaleFor(const BlockNorm& norm);
  void PackTile(int64_t i, int64_t j, const float* tile, const float* transposed);
  void StoreSymmetric(const Panels& to, int64_t i, int64_t j, float* tile) const;
  void StoreOutput(int64_t i, int64_t j, const float* tile) const;
  void Combine(const float* tile, float alpha, const Panels& e, int64_t i, int64_t j, float beta,
               float* to) const;
  // The mean of a slot's diagonal.
  float MeanOfDiagonal(int slot) const;
  // to = slot - shift I, in bf16.
  void RoundShifted(int slot, float shift, const Panels& to);
  void MultiplyRounded(int out, double alpha, int left, int right, double beta, int e);
  // Q = shift I + split_[0] + split_[1], all but the first in bf16.
  struct Split {
    float shift;
    int terms;  // 1: what the first lost is small enough
  };
  Split SplitForApply(int q);
  void MeasureGram(int r);

  const KernelTable& kernels_;
  ThreadPool& pool_;
  const RunLayout& layout_;
  float* out_;
  Panels rows_;
  Panels cols_[2];  // the first is current
  Panels slots_[kSymmetricSlots];
  Panels split_[2];
  double* parts_;         // a number for each panel of a symmetric matrix
  int steps_left_ = 0;    // this one included
  double gram_norm_ = 0;  // ||X X^T||_F, mixed only
};

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_CPU_MATRIX_OPS_H_
