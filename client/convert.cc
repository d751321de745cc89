#include "client/convert.h"

#include <limits>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/utf8.h"

namespace dmuon::client {
namespace {

// The enums of the public header and of the messages count alike.
static_assert(static_cast<int>(Route::kShardedAdamw) == v1::ROUTE_SHARDED_ADAMW);
static_assert(static_cast<int>(Dtype::kF16) == v1::DTYPE_F16);
static_assert(static_cast<int>(AdjustLr::kNone) == v1::ADJUST_LR_NONE);
static_assert(static_cast<int>(Nonfinite::kApply) == v1::NONFINITE_APPLY);
static_assert(static_cast<int>(NsForm::kDirect) == v1::NS_FORM_DIRECT);
static_assert(static_cast<int>(StateKind::kStep) == v1::STATE_KIND_STEP);

absl::StatusOr<uint32_t> Unsigned(int64_t value, absl::string_view what) {
  if (value < 0 || value > std::numeric_limits<uint32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: expected a number from 0 to 2^32 - 1, got %d", what, value));
  }
  return static_cast<uint32_t>(value);
}

absl::Status Fill(const Parameter& from, v1::Parameter& to) {
  RETURN_IF_ERROR(CheckUtf8("name of a parameter", from.name));
  to.set_name(from.name);
  for (int64_t dimension : from.shape) {
    if (dimension < 0) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter '%s': expected dimensions of at least 1, got %d", from.name, dimension));
    }
    to.add_shape(static_cast<uint64_t>(dimension));
  }
  to.set_route(static_cast<v1::Route>(from.route));
  ASSIGN_OR_RETURN(const uint32_t boundary,
                   Unsigned(from.boundary, absl::StrCat("parameter '", from.name, "': boundary")));
  to.set_boundary(boundary);
  for (const Block& block : from.blocks) {
    if (block.row_begin < 0 || block.row_end < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter '%s': expected rows of at least 0 in a block, got [%d, %d)",
                          from.name, block.row_begin, block.row_end));
    }
    v1::Block* added = to.add_blocks();
    added->set_row_begin(static_cast<uint64_t>(block.row_begin));
    added->set_row_end(static_cast<uint64_t>(block.row_end));
  }
  return absl::OkStatus();
}

absl::Status Fill(const NewtonSchulzOptions& from, v1::NewtonSchulz& to) {
  to.set_form(static_cast<v1::NsForm>(from.form));
  ASSIGN_OR_RETURN(const uint32_t steps, Unsigned(from.steps, "newton_schulz.steps"));
  to.set_steps(steps);
  for (const auto& abc : from.coefficients) to.mutable_coefficients()->Add(abc.begin(), abc.end());
  to.set_restarts_given(from.restarts.has_value());
  if (from.restarts) {
    for (int restart : *from.restarts) {
      ASSIGN_OR_RETURN(const uint32_t index, Unsigned(restart, "newton_schulz.restarts"));
      to.add_restarts(index);
    }
  }
  if (from.iteration_dtype) to.set_iteration_dtype(static_cast<v1::Dtype>(*from.iteration_dtype));
  to.set_deterministic(from.deterministic);
  to.set_tf32(from.tf32);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::OpenSessionRequest> ToProto(const OpenOptions& options) {
  v1::OpenSessionRequest request;
  RETURN_IF_ERROR(CheckUtf8("job", options.job));
  request.set_job(options.job);
  ASSIGN_OR_RETURN(const uint32_t rank, Unsigned(options.rank, "rank"));
  request.set_rank(rank);
  ASSIGN_OR_RETURN(const uint32_t replicate, Unsigned(options.mesh.replicate, "mesh.replicate"));
  ASSIGN_OR_RETURN(const uint32_t shard, Unsigned(options.mesh.shard, "mesh.shard"));
  ASSIGN_OR_RETURN(const uint32_t tp, Unsigned(options.mesh.tp, "mesh.tp"));
  request.mutable_mesh()->set_replicate(replicate);
  request.mutable_mesh()->set_shard(shard);
  request.mutable_mesh()->set_tp(tp);
  request.set_restart_count(options.restart_count);
  RETURN_IF_ERROR(CheckUtf8("coordinator", options.coordinator));
  request.set_coordinator(options.coordinator);
  request.set_reshard_after_forward(options.reshard_after_forward);
  for (const Boundary& boundary : options.boundaries) {
    RETURN_IF_ERROR(CheckUtf8("name of a boundary", boundary.name));
    v1::Boundary* added = request.add_boundaries();
    added->set_name(boundary.name);
    added->set_exclusive_window(boundary.exclusive_window);
  }
  for (const Parameter& parameter : options.parameters) {
    RETURN_IF_ERROR(Fill(parameter, *request.add_parameters()));
  }
  request.set_formation_timeout_seconds(absl::ToDoubleSeconds(options.formation_timeout));
  return request;
}

absl::StatusOr<v1::ConfigureGroupsRequest> ToProto(const OptimizerOptions& options) {
  v1::ConfigureGroupsRequest request;
  for (const Group& group : options.groups) {
    RETURN_IF_ERROR(CheckUtf8("name of a group", group.name));
    v1::Group* added = request.add_groups();
    added->set_name(group.name);
    added->set_route(static_cast<v1::Route>(group.route));
  }
  for (const ParameterConfig& config : options.parameters) {
    v1::ParameterConfig* added = request.add_parameters();
    added->set_param_dtype(static_cast<v1::Dtype>(config.param_dtype));
    added->set_grad_dtype(static_cast<v1::Dtype>(config.grad_dtype));
    ASSIGN_OR_RETURN(const uint32_t group, Unsigned(config.group, "a parameter's group"));
    added->set_group(group);
  }
  RETURN_IF_ERROR(Fill(options.newton_schulz, *request.mutable_newton_schulz()));
  request.set_nesterov(options.nesterov);
  request.set_adjust_lr(static_cast<v1::AdjustLr>(options.adjust_lr));
  request.set_nonfinite(static_cast<v1::Nonfinite>(options.nonfinite));
  return request;
}

Placement FromProto(const v1::OpenSessionResponse& response) {
  Placement placement;
  for (const v1::Placement& entry : response.placement()) {
    placement.parameters.push_back({static_cast<int>(entry.owner()), entry.cost()});
  }
  placement.loads.assign(response.loads().begin(), response.loads().end());
  placement.imbalance = response.imbalance();
  placement.lower_bound = response.lower_bound();
  return placement;
}

StepProfile FromProto(const v1::StepRecord& record) {
  StepProfile profile;
  profile.step = record.step();
  profile.wait = record.wait_seconds();
  profile.reduce = record.reduce_seconds();
  profile.verdict = record.verdict_seconds();
  profile.update = record.update_seconds();
  profile.publish = record.publish_seconds();
  profile.total = record.total_seconds();
  profile.newton_schulz_calls = static_cast<int>(record.newton_schulz_calls());
  profile.forms = record.forms();
  profile.kernel = record.kernel();
  return profile;
}

size_t ElementBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return 4;
    case Dtype::kBF16: return 2;
    case Dtype::kF16: return 2;
  }
  return 0;
}

}  // namespace dmuon::client
