// FNV-1a, 64 bits: a digest that is the same on every machine and in every build. Not for secrets.
#ifndef DMUON_BASE_FNV1A_H_
#define DMUON_BASE_FNV1A_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace dmuon {

class Fnv1a {
 public:
  // As eight bytes, little endian.
  void Add(uint64_t value) {
    for (int i = 0; i < 8; ++i) Byte(static_cast<uint8_t>(value >> (8 * i)));
  }
  // Length first, so that ("ab", "c") and ("a", "bc") differ.
  void Add(absl::string_view text) {
    Add(uint64_t{text.size()});
    for (char c : text) Byte(static_cast<uint8_t>(c));
  }
  uint64_t value() const { return hash_; }

 private:
  void Byte(uint8_t b) { hash_ = (hash_ ^ b) * 1099511628211ull; }
  uint64_t hash_ = 14695981039346656037ull;
};

}  // namespace dmuon

#endif  // DMUON_BASE_FNV1A_H_
