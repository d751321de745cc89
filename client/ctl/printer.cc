#include "client/ctl/printer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/ctl/units.h"
#include "client/ctl/yaml.h"

namespace dmuon::ctl {
namespace {

constexpr char kGap[] = "  ";

std::string Json(const Tree& tree, int indent) {
  return tree.dump(indent, ' ', false, Tree::error_handler_t::replace) + "\n";
}

bool RightAligned(Unit unit) {
  return unit != Unit::kText && unit != Unit::kShape && unit != Unit::kTimestamp &&
         unit != Unit::kYesNo;
}

const Tree& Member(const Tree& object, const std::string& key) {
  static const Tree* const null = new Tree(nullptr);
  const auto it = object.find(key);
  return it == object.end() ? *null : *it;
}

using Cells = std::vector<std::string>;

Cells RowCells(const Tree& row, const std::vector<Column>& columns) {
  Cells cells;
  for (const Column& column : columns)
    cells.push_back(FormatValue(Member(row, column.key), column.unit));
  return cells;
}

Cells Titles(const std::vector<Column>& columns) {
  Cells cells;
  for (const Column& column : columns) cells.push_back(column.title);
  return cells;
}

// No spaces at the end of a line.
std::string Line(const Cells& cells, const std::vector<Column>& columns,
                 const std::vector<size_t>& widths) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    const std::string padding(widths[i] - std::min(widths[i], cells[i].size()), ' ');
    absl::StrAppend(&line, i > 0 ? kGap : "", RightAligned(columns[i].unit) ? padding : "",
                    cells[i], RightAligned(columns[i].unit) ? "" : padding);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

std::vector<size_t> Widths(const std::vector<Column>& columns, const std::vector<Cells>& rows) {
  std::vector<size_t> widths;
  for (size_t i = 0; i < columns.size(); ++i) {
    size_t width = std::max<size_t>(columns[i].title.size(), static_cast<size_t>(columns[i].width));
    for (const Cells& row : rows) width = std::max(width, row[i].size());
    widths.push_back(width);
  }
  return widths;
}

std::string Rows(const Tree& list, const std::vector<Column>& columns) {
  std::vector<Cells> rows;
  for (const Tree& row : list) rows.push_back(RowCells(row, columns));
  const std::vector<size_t> widths = Widths(columns, rows);
  std::string out = Line(Titles(columns), columns, widths);
  for (const Cells& row : rows) out += Line(row, columns, widths);
  return out;
}

std::string Lines(const Tree& object, const std::vector<Column>& columns) {
  size_t width = 0;
  for (const Column& column : columns) width = std::max(width, column.title.size());
  std::string out;
  for (const Column& column : columns) {
    absl::StrAppendFormat(&out, "%-*s  %s\n", static_cast<int>(width + 1), column.title + ":",
                          FormatValue(Member(object, column.key), column.unit));
  }
  return out;
}

std::string Table(const Tree& tree, const std::vector<Section>& sections) {
  std::string out;
  for (const Section& section : sections) {
    const Tree& part = section.key.empty() ? tree : Member(tree, section.key);
    absl::StrAppend(&out, out.empty() ? "" : "\n", section.title, section.title.empty() ? "" : "\n",
                    part.is_array() ? Rows(part, section.columns) : Lines(part, section.columns));
  }
  return out;
}

}  // namespace

std::string Printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

std::string FormatValue(const Tree& value, Unit unit) {
  if (value.is_null()) return "-";
  // A figure that is not finite is a word.
  if (value.is_string()) return Printable(value.get<std::string>());
  switch (unit) {
    case Unit::kText:
    case Unit::kCount: return value.dump();
    case Unit::kBytes: return HumanBytes(value.get<double>());
    case Unit::kFlops: return HumanFlops(value.get<double>());
    case Unit::kSeconds: return HumanSeconds(value.get<double>());
    case Unit::kRatio: return absl::StrFormat("%.3f", value.get<double>());
    case Unit::kNumber: return absl::StrFormat("%.4g", value.get<double>());
    case Unit::kShape: {
      std::vector<uint64_t> dimensions = value.get<std::vector<uint64_t>>();
      return absl::StrJoin(dimensions, " x ");
    }
    case Unit::kTimestamp:
      return absl::FormatTime("%Y-%m-%d %H:%M:%S",
                              absl::UnixEpoch() + absl::Seconds(value.get<double>()),
                              absl::LocalTimeZone());
    case Unit::kYesNo: return value.get<bool>() ? "yes" : "no";
  }
  return "-";
}

std::string Render(const Tree& tree, Format format, const std::vector<Section>& sections) {
  switch (format) {
    case Format::kTable: return Table(tree, sections);
    case Format::kJson: return Json(tree, 2);
    case Format::kYaml: return ToYaml(tree);
  }
  return "";
}

std::string RenderHeader(Format format, const std::vector<Column>& columns) {
  return format == Format::kTable ? Line(Titles(columns), columns, Widths(columns, {})) : "";
}

std::string RenderRow(const Tree& row, Format format, const std::vector<Column>& columns) {
  switch (format) {
    case Format::kTable: return Line(RowCells(row, columns), columns, Widths(columns, {}));
    case Format::kJson: return Json(row, -1);
    case Format::kYaml: return "---\n" + ToYaml(row);
  }
  return "";
}

}  // namespace dmuon::ctl
