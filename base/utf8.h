// Names travel as strings of protobuf, which are UTF-8 or nothing.
#ifndef DMUON_BASE_UTF8_H_
#define DMUON_BASE_UTF8_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dmuon {

// True for well-formed UTF-8 (Unicode, table 3-7): no overlong forms, no surrogates, nothing above U+10FFFF.
bool IsUtf8(absl::string_view text);

// INVALID_ARGUMENT names `what` and shows the text, what is not printable escaped.
absl::Status CheckUtf8(absl::string_view what, absl::string_view text);

}  // namespace dmuon

#endif  // DMUON_BASE_UTF8_H_
