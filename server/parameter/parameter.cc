#include "server/parameter/parameter.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

constexpr size_t kMaxParameters = 65536;
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxDimensions = 8;

std::string ShapeText(const std::vector<int64_t>& shape) { return absl::StrJoin(shape, " x "); }

absl::Status CheckShape(const Parameter& p) {
  if (p.shape.empty() || p.shape.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(absl::StrFormat("shape: expected 1 to %d dimensions, got %d",
                                                      kMaxDimensions, p.shape.size()));
  }
  int64_t numel = 1;
  for (int64_t d : p.shape) {
    if (d < 1 || __builtin_mul_overflow(numel, d, &numel) ||
        numel > std::numeric_limits<int64_t>::max() / 64) {
      return absl::InvalidArgumentError(
          absl::StrFormat("shape: expected dimensions >= 1 and a size that fits memory, got %s",
                          ShapeText(p.shape)));
    }
  }
  return absl::OkStatus();
}

// Blocks tile the rows in order, without gap or overlap.
absl::Status CheckBlocks(const Parameter& p) {
  const int64_t rows = AsMatrix(p).rows;
  int64_t next = 0;
  for (const Block& b : p.blocks) {
    if (b.row_begin != next || b.row_end <= b.row_begin || b.row_end > rows) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "blocks: expected ranges that tile %d rows in order, got [%d, %d) after row %d", rows,
          b.row_begin, b.row_end, next));
    }
    next = b.row_end;
  }
  if (next != rows) {
    return absl::InvalidArgumentError(
        absl::StrFormat("blocks: expected ranges that tile %d rows, got %d rows", rows, next));
  }
  return absl::OkStatus();
}

std::vector<Block> DefaultBlocks(const Parameter& p) {
  const int64_t rows = AsMatrix(p).rows;
  const int64_t height = p.shape.size() == 3 ? p.shape[1] : rows;
  std::vector<Block> blocks;
  for (int64_t at = 0; at < rows; at += height) blocks.push_back({at, at + height});
  return blocks;
}

absl::Status CheckOne(Parameter& p, size_t boundaries) {
  RETURN_IF_ERROR(CheckShape(p));
  if (p.boundary.value() < 0 || p.boundary.index() >= boundaries) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "boundary: expected an index below %d, got %d", boundaries, p.boundary.value()));
  }
  switch (p.route) {
    case Route::kShardedAdamw:
      return absl::UnimplementedError("route sharded_adamw is not built yet");
    case Route::kAdamw:
      if (!p.blocks.empty()) {
        return absl::InvalidArgumentError("blocks: expected none on route adamw");
      }
      return absl::OkStatus();
    case Route::kMuon:
      if (p.shape.size() < 2) {
        return absl::InvalidArgumentError(
            absl::StrFormat("route muon: expected at least 2 dimensions, got shape %s (use route "
                            "adamw for vectors)",
                            ShapeText(p.shape)));
      }
      if (p.blocks.empty()) p.blocks = DefaultBlocks(p);
      return CheckBlocks(p);
  }
  return absl::InvalidArgumentError("route: not specified");
}

std::string Describe(const Parameter& p) {
  return absl::StrFormat("'%s' (%s, %s, boundary %d, %d blocks)", p.name, ShapeText(p.shape),
                         Name(p.route), p.boundary.value(), p.blocks.size());
}

bool SameBlocks(const Parameter& a, const Parameter& b) {
  return std::equal(a.blocks.begin(), a.blocks.end(), b.blocks.begin(), b.blocks.end(),
                    [](const Block& x, const Block& y) {
                      return x.row_begin == y.row_begin && x.row_end == y.row_end;
                    });
}

}  // namespace

absl::string_view Name(Route route) {
  switch (route) {
    case Route::kMuon: return "muon";
    case Route::kAdamw: return "adamw";
    case Route::kShardedAdamw: return "sharded_adamw";
  }
  return "?";
}

int64_t Parameter::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

MatrixShape AsMatrix(const Parameter& parameter) {
  const std::vector<int64_t>& s = parameter.shape;
  if (s.size() == 1) return {1, s[0]};
  if (s.size() == 3) return {s[0] * s[1], s[2]};
  return {s[0], parameter.numel() / s[0]};
}

absl::Status CheckName(absl::string_view what, absl::string_view name, EmptyName empty) {
  const size_t least = empty == EmptyName::kAllowed ? 0 : 1;
  if (name.size() < least || name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: expected %d to %d bytes, got %d", what,
                                                      least, kMaxNameBytes, name.size()));
  }
  if (std::any_of(name.begin(), name.end(), absl::ascii_iscntrl)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s: expected no control characters, got '%s'", what, absl::CHexEscape(name)));
  }
  return absl::OkStatus();
}

absl::Status CheckAndResolve(ParameterTable& table) {
  if (table.parameters.empty() || table.parameters.size() > kMaxParameters) {
    return absl::InvalidArgumentError(absl::StrFormat("parameters: expected 1 to %d, got %d",
                                                      kMaxParameters, table.parameters.size()));
  }
  if (table.boundaries.empty() || table.boundaries.size() > kMaxParameters) {
    return absl::InvalidArgumentError(absl::StrFormat("boundaries: expected 1 to %d, got %d",
                                                      kMaxParameters, table.boundaries.size()));
  }
  absl::flat_hash_set<std::string> names;
  std::vector<bool> used(table.boundaries.size(), false);
  for (Parameter& p : table.parameters) {
    RETURN_IF_ERROR(CheckName("parameter name", p.name, EmptyName::kRefused));
    if (!names.insert(p.name).second) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter '%s': the name occurs twice", p.name));
    }
    RETURN_IF_ERROR(
        Annotate(CheckOne(p, table.boundaries.size()), absl::StrFormat("parameter '%s'", p.name)));
    used[p.boundary.index()] = true;
  }
  for (size_t b = 0; b < used.size(); ++b) {
    RETURN_IF_ERROR(CheckName("boundary name", table.boundaries[b].name, EmptyName::kAllowed));
    if (!used[b]) {
      return absl::InvalidArgumentError(
          absl::StrFormat("boundary '%s': it has no parameter", table.boundaries[b].name));
    }
  }
  return absl::OkStatus();
}

uint64_t Digest(const ParameterTable& table) {
  Fnv1a hash;
  hash.Add(table.boundaries.size());
  for (const Boundary& b : table.boundaries) {
    hash.Add(b.name);
    hash.Add(uint64_t{b.exclusive_window});
  }
  hash.Add(table.parameters.size());
  for (const Parameter& p : table.parameters) {
    hash.Add(p.name);
    hash.Add(p.shape.size());
    for (int64_t d : p.shape) hash.Add(static_cast<uint64_t>(d));
    hash.Add(static_cast<uint64_t>(p.route));
    hash.Add(p.boundary.index());
    hash.Add(p.blocks.size());
    for (const Block& b : p.blocks) hash.Add(static_cast<uint64_t>(b.row_end));
  }
  return hash.value();
}

std::string FirstDifference(const ParameterTable& a, const ParameterTable& b) {
  const size_t common = std::min(a.parameters.size(), b.parameters.size());
  for (size_t i = 0; i < common; ++i) {
    const Parameter& x = a.parameters[i];
    const Parameter& y = b.parameters[i];
    if (x.name != y.name || x.shape != y.shape || x.route != y.route || x.boundary != y.boundary ||
        !SameBlocks(x, y)) {
      return absl::StrFormat("parameter %d: %s against %s", i, Describe(x), Describe(y));
    }
  }
  if (a.parameters.size() != b.parameters.size()) {
    const ParameterTable& longer = a.parameters.size() > common ? a : b;
    return absl::StrFormat("%d against %d parameters; only one side has '%s'", a.parameters.size(),
                           b.parameters.size(), longer.parameters[common].name);
  }
  if (a.boundaries.size() != b.boundaries.size()) {
    return absl::StrFormat("%d against %d boundaries", a.boundaries.size(), b.boundaries.size());
  }
  for (size_t i = 0; i < a.boundaries.size(); ++i) {
    if (a.boundaries[i].name != b.boundaries[i].name ||
        a.boundaries[i].exclusive_window != b.boundaries[i].exclusive_window) {
      return absl::StrFormat("boundary %d: '%s' against '%s'", i, a.boundaries[i].name,
                             b.boundaries[i].name);
    }
  }
  return "";
}

}  // namespace dmuon::server
