#include "client/ctl/usage.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/edit_distance.h"
#include "client/ctl/printer.h"

namespace dmuon::ctl {
namespace {

// A word with more wrong letters than this is meant to be something else.
constexpr size_t kNear = 2;

}  // namespace

std::string CheckWhole(const std::string& text, uint64_t most) {
  uint64_t number;
  if (absl::SimpleAtoi(text, &number) && number <= most) return "";
  return absl::StrFormat("expected a whole number from 0 to %d, got '%s'", most, Printable(text));
}

std::string CheckTimeout(const std::string& text) {
  double seconds;
  if (absl::SimpleAtod(text, &seconds) && seconds >= kLeastTimeoutSeconds &&
      seconds <= kMostTimeoutSeconds) {
    return "";
  }
  return absl::StrFormat("expected %g to %.0f seconds, got '%s'", kLeastTimeoutSeconds,
                         kMostTimeoutSeconds, Printable(text));
}

std::string UnknownVerb(const std::string& given, const std::vector<std::string>& verbs) {
  std::string text = absl::StrFormat("no such command: '%s'", Printable(given));
  const auto nearest = std::min_element(verbs.begin(), verbs.end(),
                                        [&given](const std::string& a, const std::string& b) {
                                          return EditDistance(given, a) < EditDistance(given, b);
                                        });
  if (nearest != verbs.end() && EditDistance(given, *nearest) <= kNear) {
    absl::StrAppend(&text, "; did you mean '", *nearest, "'?");
  }
  return absl::StrCat(text, "\nCommands: ", absl::StrJoin(verbs, ", "));
}

}  // namespace dmuon::ctl
