// What host code and kernels say of matrices, without CUDA's headers. C++17 and free of Abseil, as launch.h.
#ifndef DMUON_KERNELS_CUDA_SHAPES_H_
#define DMUON_KERNELS_CUDA_SHAPES_H_

#include <cstddef>
#include <cstdint>

namespace dmuon::cuda {

enum class Element : uint8_t { kF32 = 1, kBF16 = 2, kF16 = 3 };  // as dmuon::Dtype

constexpr int64_t ElementBytes(Element element) { return element == Element::kF32 ? 4 : 2; }

// The most thread blocks of one reduction, and the most partial results of all that run at once.
constexpr int kMaxBlocks = 2048;
constexpr int kMaxPartials = 1 << 16;

// The most blocks of one shape that run together.
constexpr int kMostTogether = 128;

// A dense fp32 matrix and its place in a padded one of the iteration's element type.
struct PaddedShape {
  int64_t rows = 0, cols = 0;  // dense, row-major
  int64_t padded_rows = 0,
          padded_cols = 0;  // row-major; padded_cols is the leading dimension, a multiple of 8
};

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_SHAPES_H_
