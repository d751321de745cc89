// Reading and writing what a session keeps, at the owner's worker.

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "server/session/session.h"

namespace dmuon::server {

absl::StatusOr<Session::Located> Session::Locate(const std::string& parameter,
                                                 StateKind kind) const {
  const std::vector<Parameter>& parameters = context_.table.parameters;
  const auto it = std::find_if(parameters.begin(), parameters.end(),
                               [&](const Parameter& p) { return p.name == parameter; });
  if (it == parameters.end()) {
    return absl::NotFoundError(
        absl::StrFormat("session '%s': no parameter '%s'", name(), parameter));
  }
  const bool muon = it->route == Route::kMuon;
  const bool there = kind == StateKind::kWeight || (kind == StateKind::kMomentum ? muon : !muon);
  if (!there) {
    return absl::InvalidArgumentError(
        absl::StrFormat("parameter '%s' on route %s: no such state", parameter, Name(it->route)));
  }
  const uint64_t bytes = kind == StateKind::kStep ? sizeof(int64_t) : sizeof(float) * it->numel();
  return Located{ParameterId(static_cast<int32_t>(it - parameters.begin())), bytes};
}

absl::StatusOr<uint64_t> Session::StateBytes(const std::string& parameter, StateKind kind) const {
  ASSIGN_OR_RETURN(const Located located, Locate(parameter, kind));
  return located.bytes;
}

kernels::Backend& Session::BackendOf(ParameterId parameter) const {
  return context_.backend(placement_.owner[parameter.index()]);
}

// Not older than what any trainer has seen of the last step.
absl::Status Session::RunAtOwner(ParameterId parameter,
                                 absl::FunctionRef<void(kernels::Stream)> work) {
  {
    absl::MutexLock lock(&mu_);
    if (!failure_.ok()) return failure_;
    if (!built_) {
      return absl::FailedPreconditionError(
          absl::StrFormat("session '%s': it is not configured yet", name()));
    }
  }
  const SlotId owner = placement_.owner[parameter.index()];
  return workers_[owner.index()]->Run(context_.answered_step.load(), work);
}

absl::StatusOr<std::vector<std::byte>> Session::ReadState(const std::string& parameter,
                                                          StateKind kind) {
  ASSIGN_OR_RETURN(const Located located, Locate(parameter, kind));
  std::vector<std::byte> data(located.bytes);
  absl::Status device;
  RETURN_IF_ERROR(RunAtOwner(located.parameter, [&](kernels::Stream stream) {
    const ParameterState& state = context_.state[located.parameter.index()];
    if (kind == StateKind::kStep) {
      std::memcpy(data.data(), &state.adamw_steps, sizeof(int64_t));
      return;
    }
    kernels::Backend& backend = BackendOf(located.parameter);
    backend.CopyToHost(stream, data.data(), Array(state, kind), located.bytes);
    device = backend.Synchronize(stream);
  }));
  RETURN_IF_ERROR(device);
  return data;
}

absl::Status Session::WriteState(const std::string& parameter, StateKind kind,
                                 absl::Span<const std::byte> data) {
  ASSIGN_OR_RETURN(const Located located, Locate(parameter, kind));
  if (data.size() != located.bytes) {
    return absl::InvalidArgumentError(absl::StrFormat("parameter '%s': expected %d bytes, got %d",
                                                      parameter, located.bytes, data.size()));
  }
  absl::Status device;
  RETURN_IF_ERROR(RunAtOwner(located.parameter, [&](kernels::Stream stream) {
    ParameterState& state = context_.state[located.parameter.index()];
    if (kind == StateKind::kStep) {
      std::memcpy(&state.adamw_steps, data.data(), sizeof(int64_t));
      return;
    }
    kernels::Backend& backend = BackendOf(located.parameter);
    backend.CopyFromHost(stream, Array(state, kind), data.data(), located.bytes);
    device = backend.Synchronize(stream);
  }));
  RETURN_IF_ERROR(device);
  if (kind != StateKind::kWeight) return absl::OkStatus();
  absl::MutexLock lock(&publishing_);
  return workers_[placement_.owner[located.parameter.index()].index()]->Publish(
      {located.parameter});
}

}  // namespace dmuon::server
