#include "kernels/newton_schulz/cost_table.h"

#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/newton_schulz/form.h"

namespace dmuon::kernels {
namespace {

using testing::HasSubstr;

// Two sides, two aspects, rates that say where they are from.
CostTable Table() {
  CostSeries series;
  series.asked = {std::nullopt, Dtype::kBF16};
  series.sides = {64, 1024};
  series.aspects = {1, 4};
  series.rates = {{1e9, 2e9}, {3e9, 4e9}, {5e9, 6e9}, {7e9, 8e9}};
  return {{series}, 1e10};
}

// The same rates everywhere: gram takes `ratio` of direct's time on an m x n block.
NewtonSchulzOptions WhereGramTakes(double ratio, int64_t m, int64_t n) {
  const NewtonSchulzOptions plain;
  CostTable table = Table();
  table.series[0].sides = {64};
  table.series[0].aspects = {1};
  table.series[0].rates = {
      {FlopsOfForm(NsForm::kDirect, plain, m, n), FlopsOfForm(NsForm::kGram, plain, m, n) / ratio}};
  NewtonSchulzOptions options;
  options.costs = std::make_shared<const CostTable>(table);
  return options;
}

TEST(CostTable, WhatNoMeasurementGivesIsRefused) {
  EXPECT_TRUE(Check(Table()).ok());
  const auto message_of = [](auto change) {
    CostTable table = Table();
    change(table);
    const absl::Status status = Check(table);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  for (double bad : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e300}) {
    EXPECT_THAT(message_of([&](CostTable& t) { t.series[0].rates[2].gram = bad; }),
                HasSubstr("rates: gram: expected"));
    EXPECT_THAT(message_of([&](CostTable& t) { t.series[0].rates[0].direct = bad; }),
                HasSubstr("rates: direct: expected"));
    EXPECT_THAT(message_of([&](CostTable& t) { t.bytes_per_second = bad; }),
                HasSubstr("bytes_per_second: expected"));
    EXPECT_THAT(message_of([&](CostTable& t) { t.series[0].aspects[1] = bad; }),
                HasSubstr("aspects[1]: expected"));
  }
  EXPECT_THAT(message_of([](CostTable& t) {
                t.series[0].sides = {64, 64};
              }),
              HasSubstr("sides[1]: expected a value above 64"));
  EXPECT_THAT(message_of([](CostTable& t) { t.series[0].sides = {0, 64}; }), HasSubstr("sides[0]"));
  EXPECT_THAT(message_of([](CostTable& t) { t.series[0].sides.clear(); }), HasSubstr("sides"));
  EXPECT_THAT(message_of([](CostTable& t) { t.series[0].rates.pop_back(); }),
              HasSubstr("rates: expected 2 x 2, given 3"));
  EXPECT_THAT(message_of([](CostTable& t) { t.series[0].asked.clear(); }), HasSubstr("asked"));
  EXPECT_THAT(message_of([](CostTable& t) { t.series.clear(); }), HasSubstr("series"));
}

TEST(CostTable, SecondsAreFlopsByTheRateOfThePlaceOnTheGrid) {
  const CostTable table = Table();
  const CostSeries& series = table.series[0];
  const NewtonSchulzOptions options;
  const auto rate = [&](NsForm form, int64_t rows, int64_t cols) {
    return FlopsOfForm(form, options, rows, cols) / Seconds(series, form, options, rows, cols);
  };
  EXPECT_DOUBLE_EQ(rate(NsForm::kDirect, 64, 64), 1e9);
  EXPECT_DOUBLE_EQ(rate(NsForm::kGram, 64, 256), 4e9);
  EXPECT_DOUBLE_EQ(rate(NsForm::kGram, 256, 64), 4e9) << "the same transposed";
  EXPECT_DOUBLE_EQ(rate(NsForm::kDirect, 1024, 4096), 7e9);
  EXPECT_DOUBLE_EQ(rate(NsForm::kDirect, 256, 256), 3e9) << "half way between 64 and 1024";
  EXPECT_DOUBLE_EQ(rate(NsForm::kDirect, 64, 128), 2e9) << "half way between aspects 1 and 4";
  EXPECT_DOUBLE_EQ(rate(NsForm::kDirect, 256, 512), 4e9);
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{8, 8}, {64, 1}, {64, 64}}) {
    EXPECT_DOUBLE_EQ(Seconds(series, NsForm::kDirect, options, rows, cols),
                     Seconds(series, NsForm::kDirect, options, 64, 64))
        << "below the grid";
  }
  EXPECT_DOUBLE_EQ(rate(NsForm::kGram, 4096, 65536), 8e9) << "beyond it";
}

TEST(CostTable, TheDtypeThatIsAskedForFindsItsSeries) {
  CostTable table = Table();
  table.series.push_back(table.series[0]);
  table.series[1].asked = {Dtype::kF32};
  NewtonSchulzOptions options;
  EXPECT_EQ(FindSeries(table, options), &table.series[0]);
  options.iteration_dtype = Dtype::kBF16;
  EXPECT_EQ(FindSeries(table, options), &table.series[0]);
  options.iteration_dtype = Dtype::kF16;
  EXPECT_EQ(FindSeries(table, options), nullptr);
  options.iteration_dtype = Dtype::kF32;
  EXPECT_EQ(FindSeries(table, options), &table.series[1]);
  options.tf32 = true;
  EXPECT_EQ(FindSeries(table, options), nullptr) << "tf32 is not calibrated";
  options.tf32 = false;
  options.iteration_dtype = Dtype::kF16;
  options.deterministic = true;
  EXPECT_EQ(FindSeries(table, options), &table.series[1]);
}

TEST(Form, IsTheCheaperOneAsMeasuredAndDirectWhereTheyAreNearlyEqual) {
  constexpr int64_t kM = 512, kN = 768;  // by the shape alone: direct
  EXPECT_EQ(ChooseForm({}, kM, kN), NsForm::kDirect);
  EXPECT_EQ(ChooseForm(WhereGramTakes(0.90, kM, kN), kM, kN), NsForm::kGram);
  EXPECT_EQ(ChooseForm(WhereGramTakes(0.96, kM, kN), kM, kN), NsForm::kDirect);
  EXPECT_EQ(ChooseForm(WhereGramTakes(0.90, kM, kN), kN, kM), NsForm::kGram) << "transposed";
  // And where the shape alone would say gram.
  EXPECT_EQ(ChooseForm({}, kM, 4 * kM), NsForm::kGram);
  EXPECT_EQ(ChooseForm(WhereGramTakes(1.5, kM, 4 * kM), kM, 4 * kM), NsForm::kDirect);
}

TEST(Form, DirectStaysDirectAndWhatWasNotMeasuredGoesByTheShape) {
  NewtonSchulzOptions options = WhereGramTakes(0.5, 512, 512);
  EXPECT_EQ(ChooseForm(options, 512, 512), NsForm::kGram);
  options.form = NsForm::kDirect;
  EXPECT_EQ(ChooseForm(options, 512, 512), NsForm::kDirect);
  options.form = NsForm::kGram;
  options.iteration_dtype = Dtype::kF16;
  EXPECT_EQ(ChooseForm(options, 512, 512), NsForm::kDirect);
  EXPECT_EQ(ChooseForm(options, 512, 1024), NsForm::kGram);
}

}  // namespace
}  // namespace dmuon::kernels
