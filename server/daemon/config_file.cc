#include "server/daemon/config_file.h"

#include <fcntl.h>
#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace dmuon::server {
namespace {

constexpr size_t kMaxBytes = 64 << 10;
constexpr int kMaxDepth = 8;  // of brackets and of indentation; a list in a mapping is 2

absl::Status At(absl::string_view name, const YAML::Mark& mark, absl::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat(name, ":", mark.line + 1, ": ", message));
}

// yaml-cpp recurses into nested collections, so depth is bounded before it reads. Counts what can nest: flow brackets,
// and block entries within one line ("- - - x"). Brackets in strings and comments count too, which only a file that
// is far from ours could notice.
bool TooDeep(absl::string_view text) {
  int brackets = 0, dashes = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') {
      dashes = 0;
    } else if (c == '[' || c == '{') {
      ++brackets;
    } else if ((c == ']' || c == '}') && brackets > 0) {
      --brackets;
    } else if ((c == '-' || c == '?') && i + 1 < text.size() &&
               (text[i + 1] == ' ' || text[i + 1] == '\t')) {
      ++dashes;
    }
    if (brackets > kMaxDepth || dashes > 64) return true;
  }
  return false;
}

// yaml-cpp tags a quoted scalar "!" and a plain one "?".
bool Quoted(const YAML::Node& node) { return node.Tag() == "!"; }

absl::StatusOr<ConfigText> Value(const YAML::Node& node, const std::string& key,
                                 absl::string_view name, const YAML::Mark& mark) {
  ConfigText text;
  if (node.IsScalar()) {
    text.values.push_back(node.Scalar());
    text.quoted = Quoted(node);
    return text;
  }
  if (!node.IsSequence()) {
    return At(name, mark,
              absl::StrCat(Escaped(key), ": expected a value, given ",
                           node.IsMap() ? "a mapping" : "nothing"));
  }
  text.is_list = true;
  for (const YAML::Node& element : node) {
    if (!element.IsScalar()) {
      return At(name, element.Mark(),
                absl::StrCat(Escaped(key), ": expected a list of plain values"));
    }
    text.values.push_back(element.Scalar());
    text.quoted |= Quoted(element);
  }
  return text;
}

absl::StatusOr<std::vector<FileSetting>> Settings(const YAML::Node& root, absl::string_view name) {
  std::vector<FileSetting> settings;
  if (root.IsNull()) return settings;  // empty, or comments only
  if (!root.IsMap()) return At(name, root.Mark(), "expected a mapping of keys to values");
  std::set<std::string> seen;
  for (const auto& pair : root) {
    const YAML::Mark mark = pair.first.Mark();
    if (!pair.first.IsScalar()) return At(name, mark, "expected a key");
    FileSetting setting;
    setting.key = pair.first.Scalar();
    setting.line = mark.line + 1;
    if (!seen.insert(setting.key).second) {
      return At(name, mark, absl::StrCat("key '", Escaped(setting.key), "' comes twice"));
    }
    absl::StatusOr<ConfigText> text = Value(pair.second, setting.key, name, mark);
    if (!text.ok()) return text.status();
    setting.text = *std::move(text);
    settings.push_back(std::move(setting));
  }
  // yaml-cpp gives the pairs in the order of the file; errors are reported in that order too.
  return settings;
}

}  // namespace

absl::StatusOr<std::vector<FileSetting>> ParseConfigFile(absl::string_view text,
                                                         absl::string_view name) {
  if (text.size() > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": size: expected at most ", kMaxBytes, " bytes, given more"));
  }
  if (TooDeep(text)) return absl::InvalidArgumentError(absl::StrCat(name, ": nested too deep"));
  try {
    std::istringstream stream{std::string(text)};
    const std::vector<YAML::Node> documents = YAML::LoadAll(stream);
    if (documents.empty()) return std::vector<FileSetting>{};
    if (documents.size() > 1) return At(name, documents[1].Mark(), "expected one document");
    return Settings(documents[0], name);
  } catch (const YAML::Exception& e) {
    return At(name, e.mark, Escaped(e.msg));
  }
}

absl::StatusOr<std::vector<FileSetting>> ReadConfigFile(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("configuration file ", path));
  std::string text;
  char block[4096];
  for (;;) {
    const ssize_t length = read(file.get(), block, sizeof(block));
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return absl::ErrnoToStatus(errno, absl::StrCat("reading ", path));
    if (length == 0 || text.size() > kMaxBytes) break;
    text.append(block, static_cast<size_t>(length));
  }
  return ParseConfigFile(text, path);
}

}  // namespace dmuon::server
