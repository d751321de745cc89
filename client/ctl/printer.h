// One printer for all commands: a tree, and how a person would like to see it.
#ifndef DMUON_CLIENT_CTL_PRINTER_H_
#define DMUON_CLIENT_CTL_PRINTER_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace dmuon::ctl {

using Tree = nlohmann::ordered_json;

enum class Format { kTable, kJson, kYaml };

// How a value of the tree is shown in a table. JSON and YAML carry it as it is.
enum class Unit {
  kText,
  kCount,
  kBytes,
  kFlops,
  kSeconds,
  kRatio,
  kNumber,
  kShape,
  kTimestamp,
  kYesNo
};

struct Column {
  std::string title;
  std::string key;  // of each row's object
  Unit unit = Unit::kText;
  int width = 0;  // at least; for rows that come one by one
};

// A part of the table view: an object as "key: value" lines, or a list of objects as rows.
struct Section {
  std::string title;  // printed above; "" = none
  std::string key;    // member of the tree that holds the rows; "" = the tree itself
  std::vector<Column> columns;
};

// Names come from trainers: what is not printable must not reach a terminal.
std::string Printable(std::string text);

std::string FormatValue(const Tree& value, Unit unit);

// Ends with a newline; columns aligned, numbers to the right. Sections are separated by an empty line.
std::string Render(const Tree& tree, Format format, const std::vector<Section>& sections);

// For rows that come one by one: the header once, then each row; as JSON one object a line, as YAML one document each.
std::string RenderHeader(Format format, const std::vector<Column>& columns);
std::string RenderRow(const Tree& row, Format format, const std::vector<Column>& columns);

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_PRINTER_H_
