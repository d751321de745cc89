#include "server/session/session.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/gpu.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/collective/local_communicator.h"
#include "server/memory/memfd.h"
#include "server/session/layout.h"
#include "server/step/verdict.h"

namespace dmuon::server {
namespace {

constexpr size_t kRememberedSteps = 1024;

absl::Duration EffectiveTimeout(absl::Duration wanted, absl::Duration limit) {
  return wanted <= absl::ZeroDuration() ? limit : std::min(wanted, limit);
}

bool SameNewtonSchulz(const kernels::NewtonSchulzOptions& a,
                      const kernels::NewtonSchulzOptions& b) {
  return a.form == b.form && a.steps == b.steps && a.coefficients == b.coefficients &&
         a.restarts == b.restarts && a.iteration_dtype == b.iteration_dtype && a.tf32 == b.tf32 &&
         a.deterministic == b.deterministic;
}

// The first thing in which two ranks' optimizers differ; empty when there is none.
std::string FirstDifference(const ParameterTable& table, const OptimizerSpec& a,
                            const OptimizerSpec& b) {
  if (a.groups != b.groups) return "groups (number, names or routes)";
  for (size_t p = 0; p < a.parameters.size() && p < b.parameters.size(); ++p) {
    if (!(a.parameters[p] == b.parameters[p])) {
      return absl::StrFormat("dtypes or group of '%s'", table.parameters[p].name);
    }
  }
  if (!SameNewtonSchulz(a.newton_schulz, b.newton_schulz)) return "Newton-Schulz options";
  if (a.nesterov != b.nesterov) return "nesterov";
  if (a.adjust_lr != b.adjust_lr) return "adjust_lr";
  if (a.nonfinite != b.nonfinite) return "nonfinite";
  return "";
}

// Of a session's memory: one device's, the machine's, or all of it.
struct Share {
  uint64_t bytes = 0, planning = 0;
  int slots = 0;
};

absl::Status Refused(const std::string& session, const Share& share, const std::string& there) {
  const std::string planning =
      share.planning > share.bytes
          ? absl::StrFormat(", and before them %d to measure products in", share.planning)
          : "";
  return absl::ResourceExhaustedError(absl::StrFormat(
      "session '%s': needs %d bytes (arenas, state, workspace and staging of %d slots%s), %s",
      session, share.bytes, share.slots, planning, there));
}

}  // namespace

Session::Session(SessionId id, uid_t uid, const OpenSpec& first, kernels::Backend& backend,
                 Reaper& reaper, Limits limits, std::shared_ptr<const kernels::CostTable> costs)
    : id_(id),
      uid_(uid),
      limits_(limits),
      reshard_after_forward_(first.reshard_after_forward),
      backend_(backend),
      reaper_(reaper),
      by_handle_(backend.shares_by_handle()),
      formation_timeout_(EffectiveTimeout(first.formation_timeout, limits.formation_timeout)),
      costs_(std::move(costs)),
      placement_(Place(first.table, first.mesh, Costs(first.table, {.costs = costs_}))),
      context_(first.job),
      ranks_(first.mesh.world_size()),
      opening_(first.mesh.world_size()),
      configuring_(first.mesh.world_size()),
      registering_(first.mesh.world_size()) {
  context_.backends.assign(first.mesh.world_size(), &backend);
  context_.table = first.table;
  context_.mesh = first.mesh;
  context_.z3 = first.reshard_after_forward;
  context_.table_digest = Digest(first.table);
  context_.step_timeout = limits.step_timeout;
  context_.plan = MakePlan(first.table, first.mesh, placement_);
}

Session::~Session() {
  // All workers are told before any is waited for: they may be waiting for each other.
  for (const auto& worker : workers_) worker->Stop();
  for (const auto& worker : workers_) worker->Join();
  context_.exchanges.reset();  // it may be moving what the workers own
  workers_.clear();
  for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
    absl::MutexLock lock(&mu_);
    CloseArenas(r);
  }
}

// ---- the collective calls ----------------------------------------------------------------------------------------

absl::Status Session::Gather(Gathering& gathering, int rank, absl::Time deadline,
                             absl::string_view what, absl::FunctionRef<absl::Status()> complete) {
  if (!failure_.ok()) return failure_;
  if (gathering.here[rank]) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': rank %d has already called %s", name(), rank, what));
  }
  gathering.here[rank] = true;
  if (++gathering.came == context_.slots()) {
    mu_.Unlock();  // takes memory and time; nobody else is in this gathering's way
    const absl::Status status = complete();
    mu_.Lock();
    gathering.done = true;
    gathering.status = status;
    if (!status.ok()) return FailLocked(status);
    return failure_;
  }
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return gathering.done || !failure_.ok();
  };
  if (!mu_.AwaitWithDeadline(absl::Condition(&over), deadline)) {
    std::vector<int> missing;
    for (int r = 0; r < context_.slots(); ++r) {
      if (!gathering.here[r]) missing.push_back(r);
    }
    if (!missing.empty()) {
      return FailLocked(absl::DeadlineExceededError(absl::StrFormat(
          "session '%s': %s: rank(s) %s did not come within %s (%d of %d came)", name(), what,
          absl::StrJoin(missing, ", "), absl::FormatDuration(formation_timeout_), gathering.came,
          context_.slots())));
    }
    mu_.Await(absl::Condition(&over));  // all are here; the last one is at work
  }
  return failure_.ok() ? gathering.status : failure_;
}

absl::Status Session::CheckSame(const OpenSpec& spec) const {
  const auto mismatch = [&](const std::string& what) {
    return absl::InvalidArgumentError(
        absl::StrFormat("session '%s': rank %d differs from the rank that came first: %s", name(),
                        spec.rank, what));
  };
  if (!(spec.mesh == context_.mesh)) {
    return mismatch(absl::StrFormat("mesh: expected %d x %d x %d, got %d x %d x %d",
                                    context_.mesh.replicate, context_.mesh.shard, context_.mesh.tp,
                                    spec.mesh.replicate, spec.mesh.shard, spec.mesh.tp));
  }
  if (spec.reshard_after_forward != reshard_after_forward_) {
    return mismatch(absl::StrFormat("reshard_after_forward: expected %s, got %s",
                                    reshard_after_forward_ ? "true" : "false",
                                    spec.reshard_after_forward ? "true" : "false"));
  }
  if (Digest(spec.table) != context_.table_digest) {
    return mismatch(server::FirstDifference(context_.table, spec.table));
  }
  return absl::OkStatus();
}

absl::StatusOr<Opened> Session::Open(const Trainer& trainer, const OpenSpec& spec) {
  const absl::Status same = CheckSame(spec);
  absl::MutexLock lock(&mu_);
  if (!failure_.ok()) return failure_;
  if (same.ok()) {
    Rank& rank = ranks_[spec.rank];
    if (rank.came) {
      return absl::AlreadyExistsError(
          absl::StrFormat("session '%s': rank %d is attached already, by process %d", name(),
                          spec.rank, rank.trainer.pid));
    }
    rank = {trainer, true, true};
  } else {
    // While the session forms it cannot be told who is right. Once it is open, a stranger harms nobody but itself.
    return state_ == SessionState::kForming ? FailLocked(same) : same;
  }
  if (const absl::Status status = Gather(opening_, spec.rank, absl::Now() + formation_timeout_,
                                         "opening the session", [] { return absl::OkStatus(); });
      !status.ok()) {
    ranks_[spec.rank].alive = false;  // it has been told, and holds the session no longer
    return status;
  }
  if (state_ == SessionState::kForming) {
    state_ = SessionState::kOpen;
    Log(LogLevel::kInfo, "session_open",
        {{"session", name()},
         {"ranks", context_.slots()},
         {"parameters", context_.table.parameters.size()},
         {"imbalance", placement_.imbalance}});
  }
  return Opened{id_, context_.table_digest, placement_, by_handle_};
}

absl::Status Session::CheckRank(const Trainer& trainer, int rank) const {
  if (!failure_.ok()) return failure_;
  if (rank < 0 || rank >= context_.slots()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "session '%s': rank: expected below %d, got %d", name(), context_.slots(), rank));
  }
  if (!ranks_[rank].alive || ranks_[rank].trainer.attachment != trainer.attachment) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': rank %d is not this attachment's", name(), rank));
  }
  return absl::OkStatus();
}

absl::Status Session::CheckOptimizer(const OptimizerSpec& spec) const {
  if (spec.groups.empty() || spec.groups.size() > wire::kMaxGroups) {
    return absl::InvalidArgumentError(
        absl::StrFormat("groups: expected 1 to %d, got %d", wire::kMaxGroups, spec.groups.size()));
  }
  for (const auto& group : spec.groups) {
    RETURN_IF_ERROR(CheckName("group name", group.name, EmptyName::kAllowed));
  }
  const std::vector<Parameter>& parameters = context_.table.parameters;
  if (spec.parameters.size() != parameters.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("parameters: expected %d, got %d",
                                                      parameters.size(), spec.parameters.size()));
  }
  for (size_t p = 0; p < parameters.size(); ++p) {
    const int group = spec.parameters[p].group;
    if (group < 0 || group >= static_cast<int>(spec.groups.size())) {
      return absl::InvalidArgumentError(
          absl::StrFormat("parameter '%s': group: expected below %d, got %d", parameters[p].name,
                          spec.groups.size(), group));
    }
    if (spec.groups[group].route != parameters[p].route) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "parameter '%s': expected a group of route %s, got '%s' of route %s", parameters[p].name,
          Name(parameters[p].route), spec.groups[group].name, Name(spec.groups[group].route)));
    }
  }
  return kernels::Validate(spec.newton_schulz);
}

// Slots read each other's arenas and weights. Where one pair of devices cannot, the whole session exchanges.
absl::Status Session::ConnectDevices() {
  for (kernels::Backend* one : context_.backends) {
    for (kernels::Backend* other : context_.backends) {
      if (one == other) continue;
      const absl::Status enabled = one->EnableAccess(*other);
      if (absl::IsUnimplemented(enabled)) return PrepareExchanges(enabled);
      RETURN_IF_ERROR(enabled);
    }
  }
  return absl::OkStatus();
}

absl::Status Session::PrepareExchanges(const absl::Status& why) {
  const auto refused = [&](absl::string_view what) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': %s, so gradients and weights travel by NCCL: %s", name(),
                        why.message(), what));
  };
  DeviceCommunicatorOptions options;
  std::map<std::string, int> rank_on;
  for (int r = 0; r < context_.slots(); ++r) {
    const kernels::Backend& backend = *context_.backends[r];
    if (IsMig(backend.device())) {
      return refused(absl::StrFormat(
          "rank %d is on %s, and NCCL does not run on MIG instances; give all ranks the same "
          "instance, or whole GPUs",
          r, backend.device()));
    }
    const auto [on, first] = rank_on.emplace(backend.device(), r);
    if (!first) {
      return refused(
          absl::StrFormat("ranks %d and %d are both on %s, and NCCL takes one rank a device; give "
                          "each rank a GPU of "
                          "its own, or all ranks GPUs that can read each other",
                          on->second, r, backend.device()));
    }
    options.devices.push_back(backend.device());
    options.local.push_back({r, backend.ordinal()});
  }
  const absl::StatusOr<DeviceCommunicators*> library = LoadDeviceCommunicators();
  if (!library.ok()) {
    return refused(absl::StrFormat(
        "%s; install libdmuon_nccl.so beside dmuond and libnccl.so.2 where the loader finds it, or "
        "run on GPUs that can read each other",
        library.status().message()));
  }
  options.join_timeout = std::min(options.join_timeout, formation_timeout_);
  options.exchange_timeout = limits_.exchange_timeout;
  context_.exchanges = std::make_unique<ExchangeQueue>(context_.plan, **library, options);
  Log(LogLevel::kInfo, "session_exchanges",
      {{"session", name()}, {"by", (*library)->description()}, {"reason", why.message()}});
  return absl::OkStatus();
}

// All of it against the limit, and each device's share, and the machine's, against what there is.
absl::Status Session::CheckMemory(const std::vector<std::unique_ptr<Worker>>& workers) const {
  std::map<kernels::Backend*, Share> shares;  // null: the machine's
  Share all;
  for (size_t s = 0; s < workers.size(); ++s) {
    const SlotMemory& memory = workers[s]->memory();
    Share& device = shares[by_handle_ ? context_.backends[s] : nullptr];
    device.bytes += memory.device_bytes();
    device.planning = std::max(device.planning, memory.planning_bytes);
    ++device.slots;
    shares[nullptr].bytes += memory.host_bytes();
    all.bytes += memory.total();
    ++all.slots;
  }
  shares[nullptr].slots = all.slots;
  if (all.bytes > limits_.max_bytes)
    return Refused(name(), all, absl::StrFormat("max_session_bytes is %d", limits_.max_bytes));
  for (const auto& [backend, share] : shares) {
    const std::optional<uint64_t> free =
        backend != nullptr ? backend->available_bytes() : AvailableMemory();
    if (!free.has_value()) {
      return absl::UnavailableError(absl::StrFormat(
          "session '%s': %s does not say what it has free", name(), backend->device()));
    }
    const uint64_t available = *free;
    // One plan at a time, and all of them before the rest: what is measured in is gone by then.
    if (std::max(share.bytes, share.planning) <= available) continue;
    return Refused(
        name(), share,
        absl::StrFormat("%s has %d available",
                        backend != nullptr ? backend->device() : "the machine", available));
  }
  return absl::OkStatus();
}

absl::StatusOr<Configured> Session::Configure(const Trainer& trainer, int rank,
                                              OptimizerSpec spec) {
  const absl::Status valid = CheckOptimizer(spec);
  const absl::StatusOr<kernels::Backend*> backend = backend_.OnDevice(spec.device);
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckRank(trainer, rank));
  if (state_ != SessionState::kOpen) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': it is configured already", name()));
  }
  RETURN_IF_ERROR(valid);
  if (!backend.ok()) {
    return Annotate(backend.status(), absl::StrFormat("session '%s': rank %d", name(), rank));
  }
  ranks_[rank].backend = *backend;
  if (!spec_.has_value()) {
    spec_ = std::move(spec);
    spec_rank_ = rank;
  } else if (const std::string d = FirstDifference(context_.table, *spec_, spec); !d.empty()) {
    return FailLocked(absl::InvalidArgumentError(
        absl::StrFormat("session '%s': optimizer of rank %d differs from rank %d's: %s", name(),
                        rank, spec_rank_, d)));
  }
  RETURN_IF_ERROR(Gather(configuring_, rank, absl::Now() + formation_timeout_,
                         "configuring the optimizer", [this] { return BuildSlots(); }));
  return Configured{context_.layout, workers_[rank]->memory()};
}

// Everything that a step needs, before the first one. Runs once, on the last rank's thread, without the lock.
absl::Status Session::BuildSlots() {
  {
    absl::MutexLock lock(&mu_);
    context_.optimizer = *spec_;
    context_.optimizer.newton_schulz.costs = costs_;
    for (size_t r = 0; r < ranks_.size(); ++r) context_.backends[r] = ranks_[r].backend;
    Weigh(placement_, Costs(context_.table, context_.optimizer.newton_schulz));
  }
  RETURN_IF_ERROR(ConnectDevices());
  const int slots = context_.slots();
  const size_t parameters = context_.table.parameters.size();
  context_.layout = MakeLayout(context_.table, context_.optimizer, context_.z3);
  context_.state.resize(parameters);
  context_.version.reset(new std::atomic<uint64_t>[parameters]());
  context_.consumed.reset(new std::atomic<uint64_t>[context_.table.boundaries.size() * slots]());
  context_.closed_generation.reset(new std::atomic<uint64_t>[slots]());
  context_.withdrawn.reset(new std::atomic<bool>[slots]());
  context_.communicator = std::make_unique<LocalCommunicator>(
      slots, static_cast<int>(context_.table.boundaries.size()), Messages(context_).max_bytes());

  std::vector<std::unique_ptr<Worker>> workers;
  for (int s = 0; s < slots; ++s) {
    ASSIGN_OR_RETURN(std::unique_ptr<Worker> worker, Worker::Plan(context_, SlotId(s)));
    workers.push_back(std::move(worker));
  }
  RETURN_IF_ERROR(CheckMemory(workers));
  std::vector<size_t> blocks;
  for (const auto& worker : workers) {
    RETURN_IF_ERROR(worker->MakeUpdates());
    blocks.push_back(worker->blocks().size());
  }
  context_.log = std::make_unique<StepLog>(blocks, kRememberedSteps);
  if (context_.exchanges != nullptr) RETURN_IF_ERROR(context_.exchanges->Form());
  RETURN_IF_ERROR(BuildArenas());
  for (const auto& worker : workers) RETURN_IF_ERROR(worker->Allocate());
  for (const auto& worker : workers) worker->Start();

  absl::MutexLock lock(&mu_);
  workers_ = std::move(workers);
  built_ = true;
  return absl::OkStatus();
}

// ---- the end ----------------------------------------------------------------------------------------------------------

absl::Status Session::FailLocked(const absl::Status& why) {
  if (!failure_.ok()) return failure_;
  failure_ = why;
  if (state_ != SessionState::kClosed) state_ = SessionState::kDegraded;
  if (built_) {
    context_.Fail(why);
  } else {
    Log(LogLevel::kWarning, "session_failed",
        {{"session", name()},
         {"code", absl::StatusCodeToString(why.code())},
         {"reason", why.message()}});
  }
  return why;
}

void Session::Fail(const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  FailLocked(why).IgnoreError();
}

absl::Status Session::failure() const {
  absl::MutexLock lock(&mu_);
  if (!failure_.ok()) return failure_;
  return context_.failure();
}

absl::Status Session::Close(const Trainer& trainer, int rank) {
  absl::MutexLock lock(&mu_);
  if (rank < 0 || rank >= context_.slots() || !ranks_[rank].alive ||
      ranks_[rank].trainer.attachment != trainer.attachment) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': rank %d is not this attachment's", name(), rank));
  }
  ranks_[rank].alive = false;
  const absl::Status why =
      absl::AbortedError(absl::StrFormat("rank %d has closed its session", rank));
  if (!built_ || state_ == SessionState::kOpen) {
    FailLocked(Annotate(why, absl::StrFormat("session '%s'", name()))).IgnoreError();
    return absl::OkStatus();
  }
  context_.communicator->SetGone(SlotId(rank), why);
  context_.RingWorkers();
  return absl::OkStatus();
}

bool Session::TrainerGone(AttachmentId attachment) {
  absl::MutexLock lock(&mu_);
  bool ours = false;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].alive || ranks_[r].trainer.attachment != attachment) continue;
    ours = true;
    ranks_[r].alive = false;
    const absl::Status why = absl::AbortedError(absl::StrFormat(
        "session '%s': rank %d (process %d) died", name(), r, ranks_[r].trainer.pid));
    if (built_) {
      context_.communicator->SetGone(SlotId(static_cast<int32_t>(r)), why);
      context_.withdrawn[r] = true;  // the driver may take the memory of the dead
    }
    FailLocked(why).IgnoreError();
  }
  return ours;
}

bool Session::Holds(AttachmentId attachment) const {
  absl::MutexLock lock(&mu_);
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [&](const Rank& r) { return r.alive && r.trainer.attachment == attachment; });
}

bool Session::Abandoned() const {
  absl::MutexLock lock(&mu_);
  return std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.alive; });
}

}  // namespace dmuon::server
