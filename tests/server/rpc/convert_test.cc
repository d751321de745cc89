#include "server/rpc/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace dmuon::server::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::OpenSessionRequest GoodOpen() {
  v1::OpenSessionRequest request;
  request.set_job("job");
  request.set_rank(1);
  request.mutable_mesh()->set_replicate(1);
  request.mutable_mesh()->set_shard(2);
  request.mutable_mesh()->set_tp(1);
  request.set_reshard_after_forward(true);
  request.add_boundaries()->set_name("layer");
  v1::Parameter& parameter = *request.add_parameters();
  parameter.set_name("layer.w");
  parameter.add_shape(4);
  parameter.add_shape(8);
  parameter.set_route(v1::ROUTE_MUON);
  v1::Block& block = *parameter.add_blocks();
  block.set_row_begin(0);
  block.set_row_end(4);
  return request;
}

v1::ConfigureGroupsRequest GoodConfigure() {
  v1::ConfigureGroupsRequest request;
  request.add_groups()->set_route(v1::ROUTE_MUON);
  v1::ParameterConfig& config = *request.add_parameters();
  config.set_param_dtype(v1::DTYPE_BF16);
  config.set_grad_dtype(v1::DTYPE_F32);
  request.mutable_newton_schulz()->set_form(v1::NS_FORM_DIRECT);
  request.mutable_newton_schulz()->set_steps(5);
  request.set_adjust_lr(v1::ADJUST_LR_ORIGINAL);
  request.set_nonfinite(v1::NONFINITE_ERROR);
  return request;
}

template <typename Result>
void ExpectRefused(const Result& result, const std::string& text) {
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(text));
}

TEST(Convert, OpenSessionKeepsEverything) {
  const auto spec = FromProto(GoodOpen());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->job, "job");
  EXPECT_EQ(spec->rank, 1);
  EXPECT_EQ(spec->mesh, (Mesh{1, 2, 1}));
  EXPECT_TRUE(spec->reshard_after_forward);
  ASSERT_EQ(spec->table.parameters.size(), 1u);
  const Parameter& parameter = spec->table.parameters[0];
  EXPECT_EQ(parameter.name, "layer.w");
  EXPECT_THAT(parameter.shape, ElementsAre(4, 8));
  EXPECT_EQ(parameter.route, Route::kMuon);
  ASSERT_EQ(parameter.blocks.size(), 1u);
  EXPECT_EQ(parameter.blocks[0].row_end, 4);
}

TEST(Convert, AnEnumThatIsZeroOrUnknownIsRefusedWithTheParameterTheExpectedAndTheGiven) {
  v1::OpenSessionRequest open = GoodOpen();
  open.mutable_parameters(0)->set_route(v1::ROUTE_UNSPECIFIED);
  ExpectRefused(FromProto(open),
                "parameter 0 ('layer.w'): route: expected ROUTE_MUON or ROUTE_ADAMW or "
                "ROUTE_SHARDED_ADAMW, given ROUTE_UNSPECIFIED");
  open.mutable_parameters(0)->set_route(static_cast<v1::Route>(77));
  ExpectRefused(FromProto(open), "given 77");

  v1::ConfigureGroupsRequest configure = GoodConfigure();
  configure.mutable_groups(0)->set_route(v1::ROUTE_UNSPECIFIED);
  ExpectRefused(FromProto(configure), "route");
  configure = GoodConfigure();
  configure.mutable_parameters(0)->set_param_dtype(v1::DTYPE_UNSPECIFIED);
  ExpectRefused(FromProto(configure), "parameter 0: param_dtype: expected DTYPE_F32");
  configure = GoodConfigure();
  configure.mutable_parameters(0)->set_grad_dtype(static_cast<v1::Dtype>(-1));
  ExpectRefused(FromProto(configure), "grad_dtype");
  configure = GoodConfigure();
  configure.mutable_newton_schulz()->set_form(v1::NS_FORM_UNSPECIFIED);
  ExpectRefused(FromProto(configure), "newton_schulz.form");
  configure = GoodConfigure();
  configure.set_adjust_lr(v1::ADJUST_LR_UNSPECIFIED);
  ExpectRefused(FromProto(configure), "adjust_lr");
  configure = GoodConfigure();
  configure.set_nonfinite(v1::NONFINITE_UNSPECIFIED);
  ExpectRefused(FromProto(configure), "nonfinite");
  ExpectRefused(FromProto(v1::STATE_KIND_UNSPECIFIED), "kind");
}

TEST(Convert, NumbersThatTheDomainCannotHoldAreRefused) {
  v1::OpenSessionRequest open = GoodOpen();
  open.set_rank(0x80000000u);
  ExpectRefused(FromProto(open), "rank");
  open = GoodOpen();
  open.mutable_mesh()->set_shard(0xffffffffu);
  ExpectRefused(FromProto(open), "mesh.shard: expected at most 4096");
  open = GoodOpen();
  open.mutable_mesh()->set_shard(4096);
  open.mutable_mesh()->set_replicate(4096);
  ExpectRefused(FromProto(open), "world size");
  open = GoodOpen();
  open.mutable_parameters(0)->set_shape(0, std::numeric_limits<uint64_t>::max());
  ExpectRefused(FromProto(open), "'layer.w'): shape");
  open = GoodOpen();
  open.mutable_parameters(0)->mutable_blocks(0)->set_row_end(uint64_t{1} << 63);
  ExpectRefused(FromProto(open), "block.row_end");
  for (double timeout :
       {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    open = GoodOpen();
    open.set_formation_timeout_seconds(timeout);
    ExpectRefused(FromProto(open), "formation_timeout_seconds");
  }
}

TEST(Convert, NewtonSchulzIsWhatWasAsked) {
  v1::ConfigureGroupsRequest request = GoodConfigure();
  v1::NewtonSchulz& ns = *request.mutable_newton_schulz();
  for (double c : {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}) ns.add_coefficients(c);
  ns.set_restarts_given(true);
  ns.add_restarts(3);
  ns.set_iteration_dtype(v1::DTYPE_BF16);
  auto spec = FromProto(request);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->newton_schulz.form, kernels::NsForm::kDirect);
  EXPECT_EQ(spec->newton_schulz.steps, 5);
  EXPECT_THAT(spec->newton_schulz.coefficients,
              ElementsAre(kernels::Coefficients{1, 2, 3}, kernels::Coefficients{4, 5, 6}));
  EXPECT_THAT(spec->newton_schulz.restarts.value(), ElementsAre(3));
  EXPECT_EQ(spec->newton_schulz.iteration_dtype, Dtype::kBF16);
  EXPECT_EQ(spec->adjust_lr, AdjustLr::kOriginal);
  EXPECT_EQ(spec->nonfinite, Nonfinite::kError);

  // Absence is not zero.
  spec = FromProto(GoodConfigure());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->newton_schulz.restarts.has_value());
  EXPECT_FALSE(spec->newton_schulz.iteration_dtype.has_value());
  EXPECT_FALSE(spec->newton_schulz.tf32);
  v1::ConfigureGroupsRequest tf32 = GoodConfigure();
  tf32.mutable_newton_schulz()->set_iteration_dtype(v1::DTYPE_F32);
  tf32.mutable_newton_schulz()->set_tf32(true);
  spec = FromProto(tf32);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->newton_schulz.tf32);

  ns.add_coefficients(7);
  ExpectRefused(FromProto(request), "coefficients: expected three for each");
  request = GoodConfigure();
  for (uint32_t steps : {0u, 33u}) {
    request.mutable_newton_schulz()->set_steps(steps);
    ExpectRefused(FromProto(request), "newton_schulz.steps: expected 1 to 32");
  }
}

TEST(Convert, ABufferOfADeviceKeepsWhatTheTrainerSaysOfIt) {
  v1::RegisterBuffersRequest request;
  v1::Buffer& buffer = *request.add_buffers();
  buffer.set_kind(v1::BUFFER_KIND_GRAD);
  buffer.set_ipc_handle("handle");
  buffer.set_gpu_uuid("GPU-1");
  buffer.set_offset(256);
  request.set_driver_version(13010);
  request.set_runtime_version(UINT32_MAX);
  const auto registration = FromProto(request);
  ASSERT_TRUE(registration.ok());
  EXPECT_EQ(registration->buffers[0].ipc_handle, "handle");
  EXPECT_EQ(registration->buffers[0].device, "GPU-1");
  EXPECT_EQ(registration->buffers[0].offset, 256u);
  EXPECT_EQ(registration->versions.driver, 13010);
  EXPECT_EQ(registration->versions.runtime, INT_MAX);
  buffer.set_kind(v1::BUFFER_KIND_UNSPECIFIED);
  ExpectRefused(FromProto(request), "buffer.kind");
}

TEST(Convert, AStepReportBecomesARecordWithItsCodeAndReason) {
  StepReport report;
  report.session = "job";
  report.step = 9;
  report.outcome = StepOutcome::kFailed;
  report.status = absl::AbortedError("rank 1 died");
  report.total = 0.5;
  report.at = absl::FromUnixNanos(42);
  const v1::StepRecord record = ToProto(report);
  EXPECT_EQ(record.session(), "job");
  EXPECT_EQ(record.outcome(), v1::STEP_OUTCOME_FAILED);
  EXPECT_EQ(record.code(), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(record.reason(), "rank 1 died");
  EXPECT_EQ(record.total_seconds(), 0.5);
  EXPECT_EQ(record.unix_nanos(), 42);
}

TEST(Convert, ADescriptionSaysWhetherCostsAreSecondsOrFlops) {
  const auto spec = FromProto(GoodOpen());
  ASSERT_TRUE(spec.ok());
  SessionDescription description;
  description.table = spec->table;
  EXPECT_FALSE(ToProto(description).costs_measured());
  description.placement.measured = true;
  EXPECT_TRUE(ToProto(description).costs_measured());
}

TEST(Convert, WhatABlockThatDidNotRunWouldMeasureIsAbsentAndNotZero) {
  StepReport report;
  const BlockPlan plan = {
      .index = 3, .rows = {192, 256}, .form = "gram", .kernel = "gram fp32 (avx2)"};
  report.blocks.push_back({"w", plan, {}});
  report.blocks.push_back(
      {"w", plan, {.ran = true, .norm = 2, .update_rms = 0.25, .orthogonality_error = 0.125}});
  const v1::StepRecord record = ToProto(report);
  ASSERT_EQ(record.blocks_size(), 2);
  EXPECT_FALSE(record.blocks(0).has_norm());
  EXPECT_FALSE(record.blocks(0).has_update_rms());
  EXPECT_FALSE(record.blocks(0).has_orthogonality_error());
  const v1::BlockRecord& block = record.blocks(1);
  EXPECT_EQ(block.parameter(), "w");
  EXPECT_EQ(block.index(), 3u);
  EXPECT_EQ(block.rows().row_begin(), 192u);
  EXPECT_EQ(block.rows().row_end(), 256u);
  EXPECT_EQ(block.norm(), 2);
  EXPECT_EQ(block.update_rms(), 0.25);
  EXPECT_EQ(block.orthogonality_error(), 0.125);
  EXPECT_EQ(block.form(), "gram");
  EXPECT_EQ(block.kernel(), "gram fp32 (avx2)");
}

TEST(Convert, AResponseListsTheParametersInTheOrderOfTheTable) {
  const auto spec = FromProto(GoodOpen());
  ASSERT_TRUE(spec.ok());
  Opened opened;
  opened.id = SessionId(3);
  opened.placement.owner = {SlotId(1)};
  opened.placement.cost = {10};
  opened.placement.load = {0, 10};
  opened.placement.imbalance = 2;
  const v1::OpenSessionResponse response = ToProto(opened, spec->table);
  EXPECT_EQ(response.session_id(), 3u);
  ASSERT_EQ(response.placement_size(), 1);
  EXPECT_EQ(response.placement(0).name(), "layer.w");
  EXPECT_EQ(response.placement(0).owner(), 1u);
  EXPECT_EQ(response.placement(0).bytes(), 4u * 8 * 4);
  EXPECT_EQ(response.placement(0).boundary(), "layer");
  EXPECT_THAT(response.loads(), ElementsAre(0, 10));
}

}  // namespace
}  // namespace dmuon::server::rpc
