#include "base/utf8.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace dmuon {
namespace {

bool IsContinuation(char c) { return (static_cast<uint8_t>(c) & 0xc0) == 0x80; }

// Bytes of the well-formed character that `text` begins with; 0 when it begins with none.
size_t Character(absl::string_view text) {
  const auto lead = static_cast<uint8_t>(text[0]);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!IsContinuation(text[i])) return 0;
  }
  // The second byte tells what is overlong, a surrogate, or too large.
  const auto second = static_cast<uint8_t>(text[1]);
  const bool good = (lead != 0xe0 || second >= 0xa0) && (lead != 0xed || second < 0xa0) &&
                    (lead != 0xf0 || second >= 0x90) && (lead != 0xf4 || second < 0x90);
  return good ? length : 0;
}

}  // namespace

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t length = Character(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

absl::Status CheckUtf8(absl::string_view what, absl::string_view text) {
  if (IsUtf8(text)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected UTF-8, given '", absl::CHexEscape(text), "'"));
}

}  // namespace dmuon
