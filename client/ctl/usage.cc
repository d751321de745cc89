#include "client/ctl/usage.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/ctl/printer.h"

namespace dmuon::ctl {
namespace {

// A word with more wrong letters than this is meant to be something else.
constexpr size_t kNear = 2;

// How many letters must be put in, taken out or changed.
size_t Distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

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
                                          return Distance(given, a) < Distance(given, b);
                                        });
  if (nearest != verbs.end() && Distance(given, *nearest) <= kNear) {
    absl::StrAppend(&text, "; did you mean '", *nearest, "'?");
  }
  return absl::StrCat(text, "\nCommands: ", absl::StrJoin(verbs, ", "));
}

}  // namespace dmuon::ctl
