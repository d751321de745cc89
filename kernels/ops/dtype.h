// Element types of gradients, weights and Newton-Schulz iterations.
#ifndef DMUON_KERNELS_OPS_DTYPE_H_
#define DMUON_KERNELS_OPS_DTYPE_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace dmuon {

enum class Dtype : uint8_t { kF32 = 1, kBF16 = 2, kF16 = 3 };

constexpr size_t ByteSize(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

constexpr absl::string_view Name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return "fp32";
    case Dtype::kBF16: return "bf16";
    case Dtype::kF16: return "fp16";
  }
  return "?";
}

}  // namespace dmuon

#endif  // DMUON_KERNELS_OPS_DTYPE_H_
