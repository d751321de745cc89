#include "server/rpc/convert.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/generated_enum_reflection.h"

namespace dmuon::server::rpc {
namespace {

// --- enums: the numbers of the domain are those of the messages; zero and the unknown are refused --------------------

template <typename Domain, typename Proto>
absl::StatusOr<Domain> Enum(absl::string_view field, Proto value) {
  const google::protobuf::EnumDescriptor* type = google::protobuf::GetEnumDescriptor<Proto>();
  const int number = static_cast<int>(value);
  if (number != 0 && type->FindValueByNumber(number) != nullptr) return static_cast<Domain>(number);
  std::vector<std::string> expected;
  for (int i = 0; i < type->value_count(); ++i) {
    if (type->value(i)->number() != 0) expected.push_back(type->value(i)->name());
  }
  const google::protobuf::EnumValueDescriptor* given = type->FindValueByNumber(number);
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": expected ", absl::StrJoin(expected, " or "), ", given ",
                   given != nullptr ? given->name() : absl::StrCat(number)));
}

static_assert(static_cast<int>(Route::kShardedAdamw) == v1::ROUTE_SHARDED_ADAMW);
static_assert(static_cast<int>(Dtype::kF16) == v1::DTYPE_F16);
static_assert(static_cast<int>(AdjustLr::kNone) == v1::ADJUST_LR_NONE);
static_assert(static_cast<int>(Nonfinite::kApply) == v1::NONFINITE_APPLY);
static_assert(static_cast<int>(StateKind::kStep) == v1::STATE_KIND_STEP);
static_assert(static_cast<int>(SessionState::kClosed) == v1::SESSION_STATE_CLOSED);
static_assert(static_cast<int>(StepOutcome::kFailed) == v1::STEP_OUTCOME_FAILED);
static_assert(static_cast<int>(wire::ArenaKind::kWeight) == v1::BUFFER_KIND_WEIGHT);

// --- integers --------------------------------------------------------------------------------------------------------

absl::StatusOr<int> Int(absl::string_view field, uint64_t value, uint64_t most = INT_MAX) {
  if (value <= most) return static_cast<int>(value);
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": expected at most ", most, ", given ", value));
}

absl::StatusOr<int64_t> Int64(absl::string_view field, uint64_t value) {
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (value <= kMost) return static_cast<int64_t>(value);
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": expected at most ", kMost, ", given ", value));
}

// --- OpenSession -----------------------------------------------------------------------------------------------------

constexpr uint64_t kMaxAxis =
    4096;  // so that the product of three axes fits everywhere it is made in 64 bits

absl::StatusOr<Mesh> FromProto(const v1::Mesh& mesh) {
  Mesh result;
  ASSIGN_OR_RETURN(result.replicate, Int("mesh.replicate", mesh.replicate(), kMaxAxis));
  ASSIGN_OR_RETURN(result.shard, Int("mesh.shard", mesh.shard(), kMaxAxis));
  ASSIGN_OR_RETURN(result.tp, Int("mesh.tp", mesh.tp(), kMaxAxis));
  const int64_t world = int64_t{result.replicate} * result.shard * result.tp;
  if (world > static_cast<int64_t>(kMaxAxis)) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: world size: expected at most ", kMaxAxis, ", given ", world));
  }
  return result;
}

absl::StatusOr<Parameter> FromProto(const v1::Parameter& parameter) {
  Parameter result;
  result.name = parameter.name();
  ASSIGN_OR_RETURN(result.route, Enum<Route>("route", parameter.route()));
  ASSIGN_OR_RETURN(const int boundary, Int("boundary", parameter.boundary()));
  result.boundary = BoundaryId(boundary);
  for (uint64_t extent : parameter.shape()) {
    ASSIGN_OR_RETURN(result.shape.emplace_back(), Int64("shape", extent));
  }
  for (const v1::Block& block : parameter.blocks()) {
    Block& added = result.blocks.emplace_back();
    ASSIGN_OR_RETURN(added.row_begin, Int64("block.row_begin", block.row_begin()));
    ASSIGN_OR_RETURN(added.row_end, Int64("block.row_end", block.row_end()));
  }
  return result;
}

absl::StatusOr<ParameterTable> Table(const v1::OpenSessionRequest& request) {
  ParameterTable table;
  table.boundaries.reserve(request.boundaries_size());
  for (const v1::Boundary& boundary : request.boundaries()) {
    table.boundaries.push_back({boundary.name(), boundary.exclusive_window()});
  }
  table.parameters.reserve(request.parameters_size());
  for (int i = 0; i < request.parameters_size(); ++i) {
    absl::StatusOr<Parameter> parameter = FromProto(request.parameters(i));
    if (!parameter.ok()) {
      return Annotate(parameter.status(),
                      absl::StrCat("parameter ", i, " ('", request.parameters(i).name(), "')"));
    }
    table.parameters.push_back(*std::move(parameter));
  }
  return table;
}

// --- ConfigureGroups -------------------------------------------------------------------------------------------------

absl::StatusOr<kernels::NewtonSchulzOptions> FromProto(const v1::NewtonSchulz& message) {
  kernels::NewtonSchulzOptions options;
  if (message.form() != v1::NS_FORM_GRAM && message.form() != v1::NS_FORM_DIRECT) {
    return Enum<kernels::NsForm>("newton_schulz.form", message.form()).status();
  }
  options.form =
      message.form() == v1::NS_FORM_GRAM ? kernels::NsForm::kGram : kernels::NsForm::kDirect;
  if (message.steps() < 1 || message.steps() > 32) {
    return absl::InvalidArgumentError(
        absl::StrCat("newton_schulz.steps: expected 1 to 32, given ", message.steps()));
  }
  options.steps = static_cast<int>(message.steps());
  if (message.coefficients_size() % 3 != 0 || message.coefficients_size() > 3 * 32) {
    return absl::InvalidArgumentError(absl::StrCat(
        "newton_schulz.coefficients: expected three for each of at most 32 steps, given ",
        message.coefficients_size()));
  }
  for (int i = 0; i < message.coefficients_size(); i += 3) {
    options.coefficients.push_back(
        {message.coefficients(i), message.coefficients(i + 1), message.coefficients(i + 2)});
  }
  if (message.restarts_given()) {
    options.restarts.emplace();
    for (uint32_t restart : message.restarts()) {
      ASSIGN_OR_RETURN(const int before, Int("newton_schulz.restarts", restart, 31));
      options.restarts->push_back(before);
    }
  }
  if (message.iteration_dtype() != v1::DTYPE_UNSPECIFIED) {
    ASSIGN_OR_RETURN(options.iteration_dtype,
                     Enum<Dtype>("newton_schulz.iteration_dtype", message.iteration_dtype()));
  }
  options.deterministic = message.deterministic();
  options.tf32 = message.tf32();
  return options;
}

absl::StatusOr<ParameterConfig> FromProto(const v1::ParameterConfig& message) {
  ParameterConfig config;
  ASSIGN_OR_RETURN(config.param_dtype, Enum<Dtype>("param_dtype", message.param_dtype()));
  ASSIGN_OR_RETURN(config.grad_dtype, Enum<Dtype>("grad_dtype", message.grad_dtype()));
  ASSIGN_OR_RETURN(config.group, Int("group", message.group()));
  return config;
}

// --- towards the messages --------------------------------------------------------------------------------------------

v1::Mesh ToProto(const Mesh& mesh) {
  v1::Mesh message;
  message.set_replicate(static_cast<uint32_t>(mesh.replicate));
  message.set_shard(static_cast<uint32_t>(mesh.shard));
  message.set_tp(static_cast<uint32_t>(mesh.tp));
  return message;
}

// One entry for each parameter, in the order of the table.
template <typename Repeated>
void AddPlacement(const Placement& placement, const ParameterTable& table, Repeated* entries) {
  for (size_t i = 0; i < table.parameters.size(); ++i) {
    const Parameter& parameter = table.parameters[i];
    v1::Placement& entry = *entries->Add();
    entry.set_name(parameter.name);
    entry.set_route(static_cast<v1::Route>(parameter.route));
    for (int64_t extent : parameter.shape) entry.add_shape(static_cast<uint64_t>(extent));
    if (i < placement.owner.size())
      entry.set_owner(static_cast<uint32_t>(placement.owner[i].value()));
    if (i < placement.cost.size()) entry.set_cost(placement.cost[i]);
    entry.set_bytes(static_cast<uint64_t>(parameter.numel()) * sizeof(float));
    entry.set_boundary(table.boundaries[parameter.boundary.index()].name);
  }
}

void AddBlock(const BlockReport& block, v1::BlockRecord& record) {
  record.set_parameter(block.parameter);
  record.set_index(static_cast<uint32_t>(block.plan.index));
  record.mutable_rows()->set_row_begin(static_cast<uint64_t>(block.plan.rows.row_begin));
  record.mutable_rows()->set_row_end(static_cast<uint64_t>(block.plan.rows.row_end));
  record.set_form(block.plan.form);
  record.set_kernel(block.plan.kernel);
  if (!block.measures.ran) return;
  record.set_norm(block.measures.norm);
  record.set_update_rms(block.measures.update_rms);
  record.set_orthogonality_error(block.measures.orthogonality_error);
}

}  // namespace

absl::StatusOr<int> Rank(uint32_t rank) { return Int("rank", rank); }

absl::StatusOr<StateKind> FromProto(v1::StateKind kind) { return Enum<StateKind>("kind", kind); }

absl::StatusOr<OpenSpec> FromProto(const v1::OpenSessionRequest& request) {
  OpenSpec spec;
  spec.job = request.job();
  ASSIGN_OR_RETURN(spec.rank, Rank(request.rank()));
  ASSIGN_OR_RETURN(spec.mesh, FromProto(request.mesh()));
  spec.reshard_after_forward = request.reshard_after_forward();
  ASSIGN_OR_RETURN(spec.table, Table(request));
  const double timeout = request.formation_timeout_seconds();
  if (!std::isfinite(timeout) || timeout < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("formation_timeout_seconds: expected a number >= 0, given ", timeout));
  }
  spec.formation_timeout = absl::Seconds(timeout);
  return spec;
}

absl::StatusOr<OptimizerSpec> FromProto(const v1::ConfigureGroupsRequest& request) {
  OptimizerSpec spec;
  for (const v1::Group& group : request.groups()) {
    absl::StatusOr<Route> route = Enum<Route>("route", group.route());
    if (!route.ok()) return Annotate(route.status(), absl::StrCat("group '", group.name(), "'"));
    spec.groups.push_back({group.name(), *route});
  }
  spec.parameters.reserve(request.parameters_size());
  for (int i = 0; i < request.parameters_size(); ++i) {
    absl::StatusOr<ParameterConfig> config = FromProto(request.parameters(i));
    if (!config.ok()) return Annotate(config.status(), absl::StrCat("parameter ", i));
    spec.parameters.push_back(*config);
  }
  ASSIGN_OR_RETURN(spec.newton_schulz, FromProto(request.newton_schulz()));
  spec.nesterov = request.nesterov();
  ASSIGN_OR_RETURN(spec.adjust_lr, Enum<AdjustLr>("adjust_lr", request.adjust_lr()));
  ASSIGN_OR_RETURN(spec.nonfinite, Enum<Nonfinite>("nonfinite", request.nonfinite()));
  spec.device = request.gpu_uuid();
  return spec;
}

absl::StatusOr<Registration> FromProto(const v1::RegisterBuffersRequest& request) {
  Registration registration;
  for (const v1::Buffer& message : request.buffers()) {
    Buffer& buffer = registration.buffers.emplace_back();
    ASSIGN_OR_RETURN(buffer.kind, Enum<wire::ArenaKind>("buffer.kind", message.kind()));
    buffer.offset = message.offset();
    buffer.size = message.size();
    buffer.ipc_handle = message.ipc_handle();
    buffer.device = message.gpu_uuid();
  }
  constexpr uint32_t kMost = INT_MAX;
  registration.versions = {.driver = static_cast<int>(std::min(request.driver_version(), kMost)),
                           .runtime = static_cast<int>(std::min(request.runtime_version(), kMost))};
  return registration;
}

v1::RegisterBuffersResponse ToProto(const Registered& registered) {
  v1::RegisterBuffersResponse response;
  response.set_step(registered.step);
  for (const Probe& probe : registered.probes) {
    v1::Probe& message = *response.add_probes();
    message.set_kind(static_cast<v1::BufferKind>(probe.kind));
    message.set_offset(probe.offset);
    message.set_size(probe.size);
  }
  return response;
}

v1::OpenSessionResponse ToProto(const Opened& opened, const ParameterTable& table) {
  v1::OpenSessionResponse response;
  response.set_session_id(opened.id.value());
  response.set_table_digest(opened.table_digest);
  AddPlacement(opened.placement, table, response.mutable_placement());
  response.mutable_loads()->Assign(opened.placement.load.begin(), opened.placement.load.end());
  response.set_imbalance(opened.placement.imbalance);
  response.set_lower_bound(opened.placement.lower_bound);
  response.set_arenas_by_handle(opened.arenas_by_handle);
  return response;
}

v1::ConfigureGroupsResponse ToProto(const Configured& configured) {
  v1::ConfigureGroupsResponse response;
  const Layout& layout = configured.layout;
  response.set_control_bytes(layout.control_bytes);
  response.set_grad_bytes(layout.grad_bytes);
  response.set_weight_bytes(layout.weight_bytes);
  for (size_t i = 0; i < layout.grad_offset.size(); ++i) {
    v1::ParameterLayout& parameter = *response.add_parameters();
    parameter.set_grad_offset(layout.grad_offset[i]);
    parameter.set_weight_offset(layout.weight_offset[i]);
  }
  for (int window : layout.window)
    response.add_boundaries()->set_window(static_cast<uint32_t>(window));
  response.set_state_bytes(configured.memory.state_bytes);
  response.set_workspace_bytes(configured.memory.workspace_bytes);
  response.set_staging_bytes(configured.memory.staging_bytes);
  return response;
}

v1::StepRecord ToProto(const StepReport& report) {
  v1::StepRecord record;
  record.set_session(report.session);
  record.set_step(report.step);
  record.set_outcome(static_cast<v1::StepOutcome>(report.outcome));
  record.set_code(static_cast<int>(report.status.code()));
  record.set_reason(std::string(report.status.message()));
  record.set_total_norm(report.total_norm);
  record.set_clip_coefficient(report.clip_coefficient);
  record.set_wait_seconds(report.wait);
  record.set_reduce_seconds(report.reduce);
  record.set_verdict_seconds(report.verdict);
  record.set_update_seconds(report.update);
  record.set_publish_seconds(report.publish);
  record.set_total_seconds(report.total);
  record.set_newton_schulz_calls(static_cast<uint32_t>(report.newton_schulz_calls));
  record.set_forms(report.forms);
  record.set_kernel(report.kernel);
  record.set_unix_nanos(absl::ToUnixNanos(report.at));
  for (const BlockReport& block : report.blocks) AddBlock(block, *record.add_blocks());
  return record;
}

v1::SessionSummary Summary(const SessionDescription& session) {
  v1::SessionSummary summary;
  summary.set_name(session.name);
  summary.set_state(static_cast<v1::SessionState>(session.state));
  summary.set_world_size(static_cast<uint32_t>(session.mesh.world_size()));
  uint32_t attached = 0;
  for (const AttachmentStatus& a : session.attachments) attached += a.alive ? 1 : 0;
  summary.set_attached(attached);
  summary.set_step(session.step);
  summary.set_parameters(static_cast<uint32_t>(session.table.parameters.size()));
  uint64_t bytes = 0;
  for (const SlotMemory& m : session.memory) bytes += m.total();
  summary.set_bytes(bytes);
  summary.set_uid(session.uid);
  summary.set_imbalance(session.placement.imbalance);
  return summary;
}

v1::DescribeSessionResponse ToProto(const SessionDescription& session) {
  v1::DescribeSessionResponse response;
  *response.mutable_summary() = Summary(session);
  *response.mutable_mesh() = ToProto(session.mesh);
  response.set_reshard_after_forward(session.reshard_after_forward);
  AddPlacement(session.placement, session.table, response.mutable_placement());
  response.mutable_loads()->Assign(session.placement.load.begin(), session.placement.load.end());
  response.set_lower_bound(session.placement.lower_bound);
  response.set_costs_measured(session.placement.measured);
  for (const AttachmentStatus& a : session.attachments) {
    v1::AttachmentInfo& info = *response.add_attachments();
    info.set_rank(static_cast<uint32_t>(a.rank));
    info.set_pid(a.pid);
    info.set_alive(a.alive);
  }
  for (const SlotMemory& m : session.memory) {
    v1::SlotMemory& memory = *response.add_memory();
    memory.set_grad_bytes(m.grad_bytes);
    memory.set_weight_bytes(m.weight_bytes);
    memory.set_state_bytes(m.state_bytes);
    memory.set_workspace_bytes(m.workspace_bytes);
    memory.set_staging_bytes(m.staging_bytes);
    memory.set_control_bytes(m.control_bytes);
    memory.set_page_locked_bytes(m.page_locked_bytes);
    memory.set_planning_bytes(m.planning_bytes);
  }
  return response;
}

}  // namespace dmuon::server::rpc
