#include "server/daemon/config_value.h"

#include <cmath>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace dmuon::server {
namespace {

using config::v1::Config;
using google::protobuf::FieldDescriptor;
using google::protobuf::Reflection;

const FieldDescriptor* Field(absl::string_view key) {
  return Config::descriptor()->FindFieldByName(std::string(key));
}

absl::string_view TypeName(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING: return "a string";
    case FieldDescriptor::CPPTYPE_BOOL: return "true or false";
    case FieldDescriptor::CPPTYPE_DOUBLE: return "a number";
    case FieldDescriptor::CPPTYPE_UINT32: return "an unsigned integer of 32 bits";
    case FieldDescriptor::CPPTYPE_UINT64: return "an unsigned integer of 64 bits";
    default: return "a value of a type that the daemon does not read";
  }
}

absl::Status Wrong(const FieldDescriptor& field, absl::string_view expected,
                   absl::string_view given) {
  return absl::InvalidArgumentError(
      absl::StrCat(field.name(), ": expected ", expected, ", given ", given));
}

bool Digits(absl::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == absl::string_view::npos;
}

// One scalar: sets the field, or adds to it when it is repeated.
bool SetScalar(Config& config, const FieldDescriptor& field, const std::string& text, bool quoted) {
  const Reflection& r = *Config::GetReflection();
  if (quoted && field.cpp_type() != FieldDescriptor::CPPTYPE_STRING) return false;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING: r.SetString(&config, &field, text); return true;
    case FieldDescriptor::CPPTYPE_BOOL:
      if (text != "true" && text != "false") return false;
      r.SetBool(&config, &field, text == "true");
      return true;
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      double value;
      if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) return false;
      r.SetDouble(&config, &field, value);
      return true;
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      uint32_t value;
      if (!Digits(text) || !absl::SimpleAtoi(text, &value)) return false;
      field.is_repeated() ? r.AddUInt32(&config, &field, value)
                          : r.SetUInt32(&config, &field, value);
      return true;
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      uint64_t value;
      if (!Digits(text) || !absl::SimpleAtoi(text, &value)) return false;
      r.SetUInt64(&config, &field, value);
      return true;
    }
    default: return false;
  }
}

std::string StringText(const std::string& value) {
  const bool plain = !value.empty() && value != "true" && value != "false" && value != "null" &&
                     value.find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-") ==
                         std::string::npos &&
                     value[0] != '-';
  return plain ? value : absl::StrCat("\"", absl::CEscape(value), "\"");
}

}  // namespace

std::string Escaped(absl::string_view given) {
  constexpr size_t kShown = 200;
  return absl::StrCat(absl::CHexEscape(given.substr(0, kShown)),
                      given.size() > kShown ? "..." : "");
}

bool IsConfigKey(absl::string_view key) { return Field(key) != nullptr; }

bool IsBool(absl::string_view key) {
  return Field(key)->cpp_type() == FieldDescriptor::CPPTYPE_BOOL;
}

absl::Status SetValue(Config& config, absl::string_view key, const ConfigText& text) {
  const FieldDescriptor& field = *Field(key);
  const std::string list = absl::StrCat("a list, each ", TypeName(field));
  if (text.is_list != field.is_repeated()) {
    return Wrong(field, field.is_repeated() ? list : std::string(TypeName(field)),
                 text.is_list ? "a list" : absl::StrCat("'", Escaped(text.values.front()), "'"));
  }
  if (field.is_repeated()) Config::GetReflection()->ClearField(&config, &field);
  for (const std::string& value : text.values) {
    if (!SetScalar(config, field, value, text.quoted)) {
      return Wrong(field, field.is_repeated() ? list : std::string(TypeName(field)),
                   absl::StrCat(text.quoted ? "the string '" : "'", Escaped(value), "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status SetValue(Config& config, absl::string_view key, absl::string_view text) {
  ConfigText value;
  value.is_list = Field(key)->is_repeated();
  if (!value.is_list) {
    value.values.emplace_back(text);
  } else if (!text.empty()) {
    value.values = absl::StrSplit(text, ',');
  }
  return SetValue(config, key, value);
}

std::string ValueText(const Config& config, absl::string_view key) {
  const FieldDescriptor& field = *Field(key);
  const Reflection& r = *Config::GetReflection();
  if (field.is_repeated()) {
    std::vector<uint32_t> values;
    for (int i = 0; i < r.FieldSize(config, &field); ++i)
      values.push_back(r.GetRepeatedUInt32(config, &field, i));
    return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
  }
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING: return StringText(r.GetString(config, &field));
    case FieldDescriptor::CPPTYPE_BOOL: return r.GetBool(config, &field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_DOUBLE: return absl::StrCat(r.GetDouble(config, &field));
    case FieldDescriptor::CPPTYPE_UINT32: return absl::StrCat(r.GetUInt32(config, &field));
    case FieldDescriptor::CPPTYPE_UINT64: return absl::StrCat(r.GetUInt64(config, &field));
    default: return "?";
  }
}

}  // namespace dmuon::server
