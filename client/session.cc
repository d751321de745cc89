// A session's life: open, configure, start, close.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/checked_math.h"
#include "base/status_macros.h"
#include "client/convert.h"
#include "client/rpc_call.h"
#include "client/session_impl.h"

namespace dmuon::client {
namespace {

constexpr absl::Duration kCloseTimeout = absl::Seconds(30);  // a driver has time to let go

uint64_t Elements(const Parameter& parameter) {
  uint64_t count = 1;
  for (int64_t d : parameter.shape) count *= static_cast<uint64_t>(d);  // the daemon has checked it
  return count;
}

absl::Status CheckInside(const Parameter& parameter, absl::string_view arena, uint64_t offset,
                         uint64_t bytes, uint64_t arena_bytes) {
  const auto end = CheckedAdd(offset, bytes);
  if (end && *end <= arena_bytes) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat(
      "parameter '%s': the daemon's layout puts %d bytes at offset %d of a %s arena of %d bytes",
      parameter.name, bytes, offset, arena, arena_bytes));
}

absl::Status WrongPhase(const Session::Impl& s, absl::string_view verb, absl::string_view when) {
  if (s.phase == Phase::kClosed) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: session '%s' is closed", verb, s.job));
  }
  return absl::FailedPreconditionError(absl::StrFormat("%s: expected %s", verb, when));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Connection::OpenSession(OpenOptions options) {
  ASSIGN_OR_RETURN(v1::OpenSessionRequest request, ToProto(options));
  request.set_client_uuid(impl_->client_uuid);
  v1::OpenSessionResponse response;
  RETURN_IF_ERROR(impl_->Unary(&v1::Trainer::Stub::PrepareAsyncOpenSession, request, response));
  if (static_cast<size_t>(response.placement_size()) != options.parameters.size()) {
    return absl::InternalError(absl::StrFormat("expected a placement of %d parameters, got %d",
                                               options.parameters.size(),
                                               response.placement_size()));
  }
  auto session = std::make_unique<Session::Impl>();
  session->connection = impl_.get();
  session->id = response.session_id();
  session->rank = request.rank();
  session->job = std::move(options.job);
  session->z3 = options.reshard_after_forward;
  session->boundaries = std::move(options.boundaries);
  session->parameters = std::move(options.parameters);
  session->table_digest = response.table_digest();
  session->placement = FromProto(response);
  session->by_handle = response.arenas_by_handle();
  session->wanted_device = options.device;
  return std::make_unique<Session>(std::move(session));
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session::~Session() {
  if (impl_->connection->ForkedChild()) return;
  Close().IgnoreError();
}

const Placement& Session::placement() const { return impl_->placement; }

absl::Status Session::Configure(OptimizerOptions options) {
  Impl& s = *impl_;
  if (s.phase != Phase::kOpened) return WrongPhase(s, "Configure", "a session just opened");
  ASSIGN_OR_RETURN(v1::ConfigureGroupsRequest request, ToProto(options));
  request.set_session_id(s.id);
  request.set_rank(s.rank);
  if (s.by_handle) {
    RETURN_IF_ERROR(s.ChooseDevice());
    request.set_gpu_uuid(s.gpu);
  }
  v1::ConfigureGroupsResponse response;
  RETURN_IF_ERROR(
      s.connection->Unary(&v1::Trainer::Stub::PrepareAsyncConfigureGroups, request, response));
  RETURN_IF_ERROR(s.MapArenas(response));
  RETURN_IF_ERROR(s.Adopt(options, response));
  s.phase = Phase::kConfigured;
  return absl::OkStatus();
}

absl::Status Session::Impl::MapArenas(const v1::ConfigureGroupsResponse& response) {
  const auto map = [this](wire::ArenaKind kind, uint64_t bytes,
                          absl::string_view name) -> absl::StatusOr<Mapping> {
    ASSIGN_OR_RETURN(AttachSocket::Arena arena, connection->attach->Fetch(id, rank, kind));
    if (arena.bytes != bytes) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "%s arena: expected %d bytes by the layout, got %d", name, bytes, arena.bytes));
    }
    return Mapping::Map(std::move(arena.fd), bytes, name);
  };
  ASSIGN_OR_RETURN(control, map(wire::ArenaKind::kControl, response.control_bytes(), "CONTROL"));
  if (by_handle) {
    RETURN_IF_ERROR(AllocateArenas(response.grad_bytes(), response.weight_bytes()));
  } else {
    ASSIGN_OR_RETURN(grad, map(wire::ArenaKind::kGrad, response.grad_bytes(), "GRAD"));
    ASSIGN_OR_RETURN(weight, map(wire::ArenaKind::kWeight, response.weight_bytes(), "WEIGHT"));
    grad_base = grad.base();
    weight_base = weight.base();
  }
  ASSIGN_OR_RETURN(page, wire::ControlPage::Attach(control.base(), control.bytes()));
  const wire::PageLayout& layout = page.layout();
  if (layout.boundaries != boundaries.size() || layout.parameters != parameters.size() ||
      page.header().table_digest != table_digest) {
    return absl::InternalError(absl::StrFormat(
        "control page: expected %d boundaries, %d parameters, digest %016x, got %d, %d, %016x",
        boundaries.size(), parameters.size(), table_digest, layout.boundaries, layout.parameters,
        page.header().table_digest));
  }
  return absl::OkStatus();
}

absl::Status Session::Impl::Adopt(const OptimizerOptions& options,
                                  const v1::ConfigureGroupsResponse& response) {
  if (static_cast<size_t>(response.parameters_size()) != parameters.size() ||
      static_cast<size_t>(response.boundaries_size()) != boundaries.size() ||
      page.groups().size() != options.groups.size() ||
      options.parameters.size() != parameters.size()) {
    return absl::InternalError("the daemon's layout does not fit the table");
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const v1::ParameterLayout& at = response.parameters(static_cast<int>(i));
    const uint64_t elements = Elements(parameters[i]);
    const ParameterConfig& config = options.parameters[i];
    RETURN_IF_ERROR(CheckInside(parameters[i], "GRAD", at.grad_offset(),
                                elements * ElementBytes(config.grad_dtype), response.grad_bytes()));
    RETURN_IF_ERROR(CheckInside(parameters[i], "WEIGHT", at.weight_offset(),
                                elements * ElementBytes(config.param_dtype),
                                response.weight_bytes()));
    grad_offset.push_back(at.grad_offset());
    weight_offset.push_back(at.weight_offset());
  }
  for (const v1::BoundaryLayout& at : response.boundaries()) {
    if (at.window() >= boundaries.size()) {
      return absl::InternalError(absl::StrFormat("the daemon's layout names window %d of %d",
                                                 at.window(), boundaries.size()));
    }
    window.push_back(static_cast<int>(at.window()));
  }
  absl::MutexLock lock(&push_mu);
  micro.assign(boundaries.size(), 0);
  last_use.assign(boundaries.size(), {});
  holder.assign(boundaries.size(), -1);
  return absl::OkStatus();
}

absl::Status Session::Start() {
  Impl& s = *impl_;
  if (s.phase != Phase::kConfigured) return WrongPhase(s, "Start", "a configured session");
  v1::RegisterBuffersRequest request;
  request.set_session_id(s.id);
  request.set_rank(s.rank);
  const auto add = [&request](v1::BufferKind kind, const Mapping& mapping) {
    v1::Buffer* buffer = request.add_buffers();
    buffer->set_kind(kind);
    buffer->set_size(mapping.bytes());
  };
  add(v1::BUFFER_KIND_CONTROL, s.control);
  if (s.by_handle) {
    RETURN_IF_ERROR(s.DescribeArenas(request));
    RETURN_IF_ERROR(s.StartEvents());
    s.registered = true;
  } else {
    add(v1::BUFFER_KIND_GRAD, s.grad);
    add(v1::BUFFER_KIND_WEIGHT, s.weight);
  }
  v1::RegisterBuffersResponse response;
  RETURN_IF_ERROR(
      s.connection->Unary(&v1::Trainer::Stub::PrepareAsyncRegisterBuffers, request, response));
  if (s.by_handle) {
    ASSIGN_OR_RETURN(const uint64_t step, s.Confirm(response));
    s.step = step;
  } else {
    s.step = response.step();
  }
  s.phase = Phase::kStarted;
  return absl::OkStatus();
}

absl::Status Session::Close() {
  Impl& s = *impl_;
  const Phase before = s.phase.exchange(Phase::kClosed);
  if (before == Phase::kClosed) return absl::OkStatus();
  s.readies.reset();
  s.releases.reset();
  v1::CloseSessionRequest request;
  request.set_session_id(s.id);
  request.set_rank(s.rank);
  v1::CloseSessionResponse response;
  const absl::Status status = s.connection->Unary(&v1::Trainer::Stub::PrepareAsyncCloseSession,
                                                  request, response, kCloseTimeout);
  s.NoteClosed(status);
  // A session that is gone already is closed; and of a lost one nobody expects an answer.
  if (before == Phase::kLost || absl::IsNotFound(status)) return absl::OkStatus();
  return status;
}

namespace {

// An index out of range is the caller's bug, as with a vector; here it would be a write into
// another's memory.
size_t Checked(int index, size_t count, const char* what) {
  if (index >= 0 && static_cast<size_t>(index) < count) return static_cast<size_t>(index);
  fprintf(stderr, "dmuon: %s %d is not in [0, %zu), or the session is not configured\n", what,
          index, count);
  abort();
}

}  // namespace

int Session::parameters() const { return static_cast<int>(impl_->grad_offset.size()); }
int Session::boundaries() const { return static_cast<int>(impl_->window.size()); }
int Session::groups() const { return static_cast<int>(impl_->page.groups().size()); }

std::byte* Session::grad(int parameter) const {
  return impl_->grad_base +
         impl_->grad_offset[Checked(parameter, impl_->grad_offset.size(), "parameter")];
}
std::byte* Session::weight(int parameter) const {
  return impl_->weight_base +
         impl_->weight_offset[Checked(parameter, impl_->weight_offset.size(), "parameter")];
}
int Session::window(int boundary) const {
  return impl_->window[Checked(boundary, impl_->window.size(), "boundary")];
}
void Session::SetPresent(int parameter) {
  impl_->page.SetPresent(
      static_cast<uint32_t>(Checked(parameter, impl_->grad_offset.size(), "parameter")));
}
void Session::SetHyper(int group, const Hyper& hyper) {
  const size_t index = Checked(group, impl_->page.groups().size(), "group");
  impl_->page.groups()[index] = {.lr = hyper.lr,
                                 .weight_decay = hyper.weight_decay,
                                 .momentum = hyper.momentum,
                                 .beta1 = hyper.beta1,
                                 .beta2 = hyper.beta2,
                                 .eps = hyper.eps};
}

bool Session::arenas_on_device() const { return impl_->by_handle; }

std::optional<int> Session::device() const {
  if (impl_->cuda == nullptr) return std::nullopt;
  return impl_->device;
}

uint64_t Session::step() const { return impl_->step; }
uint64_t Session::generation() const { return impl_->generation; }

}  // namespace dmuon::client
