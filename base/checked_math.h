// Arithmetic on sizes that come from outside: overflow is a result, not a wrap.
#ifndef DMUON_BASE_CHECKED_MATH_H_
#define DMUON_BASE_CHECKED_MATH_H_

#include <cstdint>
#include <optional>

namespace dmuon {

inline std::optional<uint64_t> CheckedAdd(uint64_t a, uint64_t b) {
  uint64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

inline std::optional<uint64_t> CheckedMul(uint64_t a, uint64_t b) {
  uint64_t product;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// `value` rounded up to a multiple of `alignment`, a power of two.
constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

}  // namespace dmuon

#endif  // DMUON_BASE_CHECKED_MATH_H_
