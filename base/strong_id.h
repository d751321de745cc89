// An integer that names one kind of thing, so that a slot can never be passed where a boundary is meant.
#ifndef DMUON_BASE_STRONG_ID_H_
#define DMUON_BASE_STRONG_ID_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace dmuon {

template <typename Tag, typename Rep = int32_t>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep value) : value_(value) {}
  constexpr Rep value() const { return value_; }
  // For use as an index into a vector that is ordered by this id.
  constexpr size_t index() const { return static_cast<size_t>(value_); }

  friend constexpr auto operator<=>(StrongId, StrongId) = default;
  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value_);
  }

 private:
  Rep value_ = 0;
};

}  // namespace dmuon

#endif  // DMUON_BASE_STRONG_ID_H_
