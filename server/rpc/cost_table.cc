#include "server/rpc/cost_table.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dmuon::server::rpc {
namespace {

absl::StatusOr<std::optional<Dtype>> Asked(int number) {
  if (number == v1::DTYPE_UNSPECIFIED) return std::nullopt;
  if (v1::Dtype_IsValid(number)) return static_cast<Dtype>(number);
  return absl::InvalidArgumentError(absl::StrCat("asked: expected a dtype, given ", number));
}

absl::StatusOr<kernels::CostSeries> FromProto(const v1::CostSeries& message) {
  kernels::CostSeries series;
  for (int number : message.asked()) {
    ASSIGN_OR_RETURN(series.asked.emplace_back(), Asked(number));
  }
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  for (uint64_t side : message.sides()) {
    series.sides.push_back(
        static_cast<int64_t>(std::min(side, kMost)));  // far above what Check allows
  }
  series.aspects.assign(message.aspects().begin(), message.aspects().end());
  if (message.direct_flops_per_second_size() != message.gram_flops_per_second_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gram_flops_per_second: expected ", message.direct_flops_per_second_size(),
                     " values, as many as direct_flops_per_second, given ",
                     message.gram_flops_per_second_size()));
  }
  for (int i = 0; i < message.direct_flops_per_second_size(); ++i) {
    series.rates.push_back(
        {.direct = message.direct_flops_per_second(i), .gram = message.gram_flops_per_second(i)});
  }
  return series;
}

}  // namespace

absl::StatusOr<kernels::CostTable> FromProto(const v1::CostTable& message) {
  kernels::CostTable table;
  for (const v1::CostSeries& series : message.series()) {
    ASSIGN_OR_RETURN(table.series.emplace_back(), FromProto(series));
  }
  table.bytes_per_second = message.bytes_per_second();
  RETURN_IF_ERROR(kernels::Check(table));
  return table;
}

v1::CostTable ToProto(const kernels::CostTable& table) {
  v1::CostTable message;
  for (const kernels::CostSeries& series : table.series) {
    v1::CostSeries& to = *message.add_series();
    for (const std::optional<Dtype>& dtype : series.asked) {
      to.add_asked(dtype ? static_cast<v1::Dtype>(*dtype) : v1::DTYPE_UNSPECIFIED);
    }
    to.mutable_sides()->Assign(series.sides.begin(), series.sides.end());
    to.mutable_aspects()->Assign(series.aspects.begin(), series.aspects.end());
    for (const kernels::FormRates& rates : series.rates) {
      to.add_direct_flops_per_second(rates.direct);
      to.add_gram_flops_per_second(rates.gram);
    }
  }
  message.set_bytes_per_second(table.bytes_per_second);
  return message;
}

}  // namespace dmuon::server::rpc
