#include "client/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dmuon::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

OpenOptions Options() {
  OpenOptions options;
  options.job = "run-7";
  options.rank = 1;
  options.mesh = {.replicate = 2, .shard = 3, .tp = 1};
  options.reshard_after_forward = true;
  options.boundaries = {{"", true}, {"layers.0", false}};
  options.parameters = {{"layers.0.qkv", {6, 4}, Route::kMuon, 1, {{0, 2}, {2, 6}}},
                        {"bias", {4}, Route::kAdamw, 0, {}}};
  options.formation_timeout = absl::Milliseconds(1500);
  options.restart_count = 2;
  return options;
}

TEST(Convert, AnOpenRequestSaysWhatTheOptionsSay) {
  const auto request = ToProto(Options());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->job(), "run-7");
  EXPECT_EQ(request->rank(), 1u);
  EXPECT_EQ(request->mesh().shard(), 3u);
  EXPECT_TRUE(request->reshard_after_forward());
  EXPECT_TRUE(request->boundaries(0).exclusive_window());
  EXPECT_EQ(request->parameters(0).route(), v1::ROUTE_MUON);
  EXPECT_THAT(request->parameters(0).shape(), ElementsAre(6, 4));
  EXPECT_EQ(request->parameters(0).blocks(1).row_end(), 6u);
  EXPECT_EQ(request->parameters(1).route(), v1::ROUTE_ADAMW);
  EXPECT_EQ(request->formation_timeout_seconds(), 1.5);
  EXPECT_EQ(request->restart_count(), 2u);
}

TEST(Convert, NegativeNumbersAreRefusedByName) {
  OpenOptions options = Options();
  options.rank = -1;
  EXPECT_EQ(ToProto(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options();
  options.parameters[1].shape = {-4};
  const auto status = ToProto(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'bias'"));
  options = Options();
  options.parameters[0].blocks[0].row_begin = -1;
  EXPECT_EQ(ToProto(options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Convert, ANameThatIsNotUtf8IsRefusedByWhatItNames) {
  const auto error = [](auto change) {
    OpenOptions options = Options();
    change(options);
    const auto status = ToProto(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(error([](auto& o) { o.job = "a\xff"; }), "job: expected UTF-8, given 'a\\xff'");
  EXPECT_THAT(error([](auto& o) { o.parameters[1].name = "\xff"; }), HasSubstr("parameter"));
  EXPECT_THAT(error([](auto& o) { o.boundaries[1].name = "\xff"; }), HasSubstr("boundary"));
  EXPECT_THAT(error([](auto& o) { o.coordinator = "\xff"; }), HasSubstr("coordinator"));
  OptimizerOptions optimizer;
  optimizer.groups = {{"\xff", Route::kMuon}};
  EXPECT_EQ(ToProto(optimizer).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Convert, NewtonSchulzKeepsGivenApartFromDerivedRestarts) {
  OptimizerOptions options;
  options.groups = {{"all", Route::kMuon}};
  options.parameters = {{.param_dtype = Dtype::kBF16, .grad_dtype = Dtype::kF32, .group = 0}};
  auto request = ToProto(options);
  ASSERT_TRUE(request.ok());
  EXPECT_FALSE(request->newton_schulz().restarts_given());
  EXPECT_EQ(request->newton_schulz().iteration_dtype(), v1::DTYPE_UNSPECIFIED);
  EXPECT_EQ(request->parameters(0).param_dtype(), v1::DTYPE_BF16);

  options.newton_schulz.restarts.emplace();
  EXPECT_FALSE(request->newton_schulz().tf32());
  options.newton_schulz.iteration_dtype = Dtype::kF32;
  options.newton_schulz.tf32 = true;
  options.newton_schulz.coefficients = {{1, 2, 3}, {4, 5, 6}};
  request = ToProto(options);
  ASSERT_TRUE(request.ok());
  EXPECT_TRUE(request->newton_schulz().restarts_given());
  EXPECT_TRUE(request->newton_schulz().tf32());
  EXPECT_THAT(request->newton_schulz().coefficients(), ElementsAre(1, 2, 3, 4, 5, 6));
}

}  // namespace
}  // namespace dmuon::client
