#include "client/ctl/yaml.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace dmuon::ctl {
namespace {

using Tree = nlohmann::ordered_json;

bool Plain(const std::string& text) {
  if (text.empty() ||
      !(absl::ascii_isalnum(static_cast<unsigned char>(text[0])) || text[0] == '/')) {
    return false;
  }
  for (char c : text) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) &&
        !absl::StrContains("_./- ", absl::string_view(&c, 1)))
      return false;
  }
  // Words and numbers that a reader would not take for a string; 1.1 readers know yes and no.
  for (absl::string_view word : {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}) {
    if (absl::EqualsIgnoreCase(text, word)) return false;
  }
  // 0x1f, 1e5, .5, 2024-01-01, inf, nan: whatever begins like a number is quoted.
  double number;
  return !absl::SimpleAtod(text, &number) &&
         !absl::ascii_isdigit(static_cast<unsigned char>(text[0])) && text.back() != ' ';
}

std::string Scalar(const Tree& value) {
  if (value.is_string() && Plain(value.get_ref<const std::string&>()))
    return value.get<std::string>();
  return value.dump(-1, ' ', false, Tree::error_handler_t::replace);
}

bool IsBlock(const Tree& value) { return value.is_structured() && !value.empty(); }
// Short lists of numbers (a shape) stay on one line.
bool IsFlow(const Tree& value) {
  if (!value.is_array()) return false;
  for (const Tree& item : value) {
    if (!item.is_number()) return false;
  }
  return true;
}

std::string Flow(const Tree& value) {
  std::string out = "[";
  for (const Tree& item : value) absl::StrAppend(&out, out.size() > 1 ? ", " : "", Scalar(item));
  return out + "]";
}

void Emit(const Tree& value, const std::string& indent, std::string& out) {
  // The first line of a list's item continues the line of its dash.
  bool first = true;
  for (auto it = value.begin(); it != value.end(); ++it) {
    const Tree& child = *it;
    absl::StrAppend(&out, first ? "" : indent);
    first = false;
    if (value.is_array()) {
      out += "-";
    } else {
      absl::StrAppend(&out, Scalar(Tree(it.key())), ":");
    }
    if (IsFlow(child)) {
      absl::StrAppend(&out, " ", Flow(child), "\n");
    } else if (!IsBlock(child)) {
      absl::StrAppend(&out, " ", Scalar(child), "\n");
    } else if (value.is_array()) {
      out += " ";
      Emit(child, indent + "  ", out);
    } else {
      const std::string deeper = indent + "  ";
      absl::StrAppend(&out, "\n", deeper);
      Emit(child, deeper, out);
    }
  }
}

}  // namespace

std::string ToYaml(const Tree& tree) {
  if (IsFlow(tree)) return Flow(tree) + "\n";
  if (!IsBlock(tree)) return Scalar(tree) + "\n";
  std::string out;
  Emit(tree, "", out);
  return out;
}

}  // namespace dmuon::ctl
