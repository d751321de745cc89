#include "server/rpc/cost_table.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuon::server::rpc {
namespace {

using testing::HasSubstr;

kernels::CostTable Table() {
  kernels::CostSeries by_default{{std::nullopt, Dtype::kBF16}, {64, 256}, {1, 4}, {}};
  by_default.rates = {{1e9, 2e9}, {3e9, 4e9}, {5e9, 6e9}, {7e9, 8e9}};
  const kernels::CostSeries fp32{{Dtype::kF32}, {64}, {1}, {{1e8, 2e8}}};
  return {{by_default, fp32}, 1.25e10};
}

TEST(CostTable, ComesBackAsItWent) {
  const auto back = FromProto(ToProto(Table()));
  ASSERT_TRUE(back.ok()) << back.status();
  const kernels::CostTable expected = Table();
  ASSERT_EQ(back->series.size(), expected.series.size());
  for (size_t s = 0; s < expected.series.size(); ++s) {
    EXPECT_EQ(back->series[s].asked, expected.series[s].asked);
    EXPECT_EQ(back->series[s].sides, expected.series[s].sides);
    EXPECT_EQ(back->series[s].aspects, expected.series[s].aspects);
    ASSERT_EQ(back->series[s].rates.size(), expected.series[s].rates.size());
    for (size_t i = 0; i < expected.series[s].rates.size(); ++i) {
      EXPECT_EQ(back->series[s].rates[i].direct, expected.series[s].rates[i].direct);
      EXPECT_EQ(back->series[s].rates[i].gram, expected.series[s].rates[i].gram);
    }
  }
  EXPECT_EQ(back->bytes_per_second, expected.bytes_per_second);
}

TEST(CostTable, WhatIsNoTableIsRefusedWithTheField) {
  const auto message_of = [](auto change) {
    v1::CostTable message = ToProto(Table());
    change(message);
    const auto table = FromProto(message);
    EXPECT_EQ(table.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(table.status().message());
  };
  EXPECT_THAT(message_of([](v1::CostTable& t) { t.Clear(); }), HasSubstr("bytes_per_second"));
  EXPECT_THAT(message_of([](v1::CostTable& t) {
                t.mutable_series(0)->add_asked(static_cast<v1::Dtype>(77));
              }),
              HasSubstr("asked: expected a dtype, given 77"));
  EXPECT_THAT(message_of([](v1::CostTable& t) {
                t.mutable_series(0)->set_sides(1, std::numeric_limits<uint64_t>::max());
              }),
              HasSubstr("sides[1]"));
  EXPECT_THAT(
      message_of([](v1::CostTable& t) { t.mutable_series(0)->add_gram_flops_per_second(1); }),
      HasSubstr("gram_flops_per_second: expected 4 values"));
  EXPECT_THAT(
      message_of([](v1::CostTable& t) { t.mutable_series(1)->set_direct_flops_per_second(0, -1); }),
      HasSubstr("rates: direct"));
}

}  // namespace
}  // namespace dmuon::server::rpc
