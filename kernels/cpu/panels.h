// Where packed matrices lie in memory (the layout itself: kernel_table.h).
#ifndef DMUON_KERNELS_CPU_PANELS_H_
#define DMUON_KERNELS_CPU_PANELS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/kernel_table.h"
#include "kernels/ops/dtype.h"

namespace dmuon::kernels::cpu {

inline int64_t BlocksFor(int64_t size) { return (size + kTile - 1) / kTile; }

// The shape of a packed matrix: `panels` panels of `blocks` blocks.
struct PanelShape {
  Dtype dtype = Dtype::kF32;
  int64_t panels = 0;
  int64_t blocks = 0;

  int64_t packed_rows_per_block() const { return dtype == Dtype::kF32 ? kTile : kTile / 2; }
  int64_t packed_rows() const { return blocks * packed_rows_per_block(); }
  int64_t block_bytes() const { return packed_rows_per_block() * kPackedRowBytes; }
  int64_t panel_bytes() const {
    // The stretches of neighbouring panels that a macro tile uses together must not fall on the same cache sets.
    constexpr int64_t kPeriod = 32 << 10, kSkew = 16 << 10;
    const int64_t bytes = blocks * block_bytes();
    return bytes >= 2 * kPeriod && bytes % kPeriod == 0 ? bytes + kSkew : bytes;
  }
  size_t bytes() const { return static_cast<size_t>(panels * panel_bytes()); }
};

// A view.
struct Panels {
  std::byte* data = nullptr;
  PanelShape shape;

  std::byte* panel(int64_t j) const { return data + j * shape.panel_bytes(); }
  std::byte* block(int64_t i, int64_t j) const { return panel(j) + i * shape.block_bytes(); }
  float* f32(int64_t i, int64_t j) const { return reinterpret_cast<float*>(block(i, j)); }
  uint16_t* bf16(int64_t i, int64_t j) const { return reinterpret_cast<uint16_t*>(block(i, j)); }
};

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_PANELS_H_
