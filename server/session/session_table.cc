#include "server/session/session_table.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <limits>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/session/session.h"

namespace dmuon::server {
namespace {

constexpr absl::Duration kCloseDeadline = absl::Seconds(10);

uint64_t DefaultMaxBytes() {
  struct sysinfo info;
  if (sysinfo(&info) != 0) return uint64_t{1} << 34;
  return static_cast<uint64_t>(info.totalram) * info.mem_unit / 10 * 8;
}

absl::Status Draining() {
  return absl::UnavailableError("the daemon is draining: it takes no new sessions");
}

}  // namespace

struct SessionTable::Impl {
  Impl(kernels::Backend& b, SessionLimits l, std::shared_ptr<const kernels::CostTable> c)
      : backend(b), limits(l), costs(std::move(c)) {
    // What is on devices is held against what they have free.
    if (limits.max_session_bytes == 0) {
      limits.max_session_bytes =
          b.shares_by_handle() ? std::numeric_limits<uint64_t>::max() : DefaultMaxBytes();
    }
  }

  kernels::Backend& backend;
  SessionLimits limits;
  const std::shared_ptr<const kernels::CostTable> costs;

  Reaper closer{kCloseDeadline};  // outlives the sessions

  mutable absl::Mutex mu;
  bool draining ABSL_GUARDED_BY(mu) = false;
  uint64_t next_id ABSL_GUARDED_BY(mu) = 1;
  std::map<SessionId, std::shared_ptr<Session>> by_id ABSL_GUARDED_BY(mu);
  // A failed session keeps its id until its ranks have left, and gives up its name at once.
  std::map<std::string, std::shared_ptr<Session>> by_name ABSL_GUARDED_BY(mu);
  // Sessions are destroyed here: their workers may have a step to finish, and nobody else should wait for that.
  std::vector<std::shared_ptr<Session>> ended ABSL_GUARDED_BY(mu);
  bool stopping ABSL_GUARDED_BY(mu) = false;
  std::thread reaper;

  void Reap();
  absl::StatusOr<std::shared_ptr<Session>> Join(const Trainer& trainer, const OpenSpec& spec);
  absl::StatusOr<std::shared_ptr<Session>> Find(const Trainer& trainer, SessionId id) const;
  std::shared_ptr<Session> Named(const std::string& name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  absl::StatusOr<std::shared_ptr<Session>> FindNamed(const std::string& name) const;
  // Forgets sessions that no rank holds any more.
  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
};

void SessionTable::Impl::Reap() {
  for (;;) {
    std::vector<std::shared_ptr<Session>> now;
    {
      absl::MutexLock lock(&mu);
      const auto work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
        return stopping || !ended.empty();
      };
      mu.Await(absl::Condition(&work));
      if (ended.empty()) return;
      now.swap(ended);
    }
    for (std::shared_ptr<Session>& session : now) {
      const std::string name = session->name();
      session.reset();
      Log(LogLevel::kInfo, "session_closed", {{"session", name}});
    }
  }
}

void SessionTable::Impl::Sweep() {
  for (auto it = by_id.begin(); it != by_id.end();) {
    if (!it->second->Abandoned()) {
      ++it;
      continue;
    }
    const auto named = by_name.find(it->second->name());
    if (named != by_name.end() && named->second == it->second) by_name.erase(named);
    ended.push_back(std::move(it->second));
    it = by_id.erase(it);
  }
}

SessionTable::SessionTable(kernels::Backend& backend, SessionLimits limits,
                           std::shared_ptr<const kernels::CostTable> costs)
    : impl_(std::make_unique<Impl>(backend, limits, std::move(costs))) {
  impl_->reaper = std::thread([impl = impl_.get()] { impl->Reap(); });
}

SessionTable::~SessionTable() {
  {
    absl::MutexLock lock(&impl_->mu);
    for (auto& [id, session] : impl_->by_id) impl_->ended.push_back(session);
    impl_->by_id.clear();
    impl_->by_name.clear();
    impl_->stopping = true;
  }
  impl_->reaper.join();
}

// The session of this name, made when there is none. An own session that failed gives up its name.
absl::StatusOr<std::shared_ptr<Session>> SessionTable::Impl::Join(const Trainer& trainer,
                                                                  const OpenSpec& spec) {
  absl::MutexLock lock(&mu);
  const auto it = by_name.find(spec.job);
  if (it != by_name.end()) {
    const std::shared_ptr<Session>& session = it->second;
    if (session->uid() != trainer.uid) {
      return absl::PermissionDeniedError(
          absl::StrFormat("session '%s' belongs to another user", spec.job));
    }
    if (session->failure().ok()) return session;
    by_name.erase(it);
  }
  if (draining) return Draining();
  if (static_cast<int>(by_id.size()) >= limits.max_sessions) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("sessions: max_sessions is %d", limits.max_sessions));
  }
  const SessionId id(next_id++);
  auto session =
      std::make_shared<Session>(id, trainer.uid, spec, backend, closer,
                                Session::Limits{limits.formation_timeout, limits.step_timeout,
                                                limits.exchange_timeout, limits.max_session_bytes},
                                costs);
  by_id[id] = session;
  by_name[spec.job] = session;
  Log(LogLevel::kInfo, "session_forming",
      {{"session", spec.job}, {"uid", trainer.uid}, {"ranks", spec.mesh.world_size()}});
  return session;
}

absl::StatusOr<Opened> SessionTable::Open(const Trainer& trainer, OpenSpec spec) {
  RETURN_IF_ERROR(CheckName("job", spec.job, EmptyName::kRefused));
  RETURN_IF_ERROR(Check(spec.mesh));
  if (spec.rank < 0 || spec.rank >= spec.mesh.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank: expected 0 to %d, got %d", spec.mesh.world_size() - 1, spec.rank));
  }
  RETURN_IF_ERROR(CheckAndResolve(spec.table));
  ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, impl_->Join(trainer, spec));
  absl::StatusOr<Opened> opened = session->Open(trainer, spec);
  if (!opened.ok()) {
    absl::MutexLock lock(&impl_->mu);
    impl_->Sweep();
  }
  return opened;
}

absl::StatusOr<std::shared_ptr<Session>> SessionTable::Impl::Find(const Trainer& trainer,
                                                                  SessionId id) const {
  absl::MutexLock lock(&mu);
  const auto it = by_id.find(id);
  if (it == by_id.end()) {
    return absl::NotFoundError(absl::StrFormat("session id %d: no such session", id.value()));
  }
  if (it->second->uid() != trainer.uid) {
    return absl::PermissionDeniedError(
        absl::StrFormat("session id %d belongs to another user", id.value()));
  }
  return it->second;
}

absl::StatusOr<Configured> SessionTable::Configure(const Trainer& trainer, SessionId id, int rank,
                                                   OptimizerSpec spec) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->Configure(trainer, rank, std::move(spec));
}

absl::StatusOr<ArenaHandle> SessionTable::Arena(const Trainer& trainer, SessionId id, int rank,
                                                wire::ArenaKind kind) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->Arena(trainer, rank, kind);
}

absl::StatusOr<Registered> SessionTable::Register(const Trainer& trainer, SessionId id, int rank,
                                                  const Registration& registration) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->Register(trainer, rank, registration);
}

absl::StatusOr<uint64_t> SessionTable::Confirm(const Trainer& trainer, SessionId id, int rank,
                                               const std::vector<std::string>& found) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->Confirm(trainer, rank, found);
}

absl::StatusOr<StepReport> SessionTable::StepResult(const Trainer& trainer, SessionId id,
                                                    uint64_t step, bool with_blocks) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->StepResult(step, with_blocks);
}

absl::StatusOr<uint64_t> SessionTable::StateBytes(const Trainer& trainer, SessionId id,
                                                  const std::string& parameter,
                                                  StateKind kind) const {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->StateBytes(parameter, kind);
}

absl::StatusOr<std::vector<std::byte>> SessionTable::ReadState(const Trainer& trainer, SessionId id,
                                                               const std::string& parameter,
                                                               StateKind kind) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->ReadState(parameter, kind);
}

absl::Status SessionTable::WriteState(const Trainer& trainer, SessionId id,
                                      const std::string& parameter, StateKind kind,
                                      absl::Span<const std::byte> data) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  return session->WriteState(parameter, kind, data);
}

absl::Status SessionTable::Close(const Trainer& trainer, SessionId id, int rank) {
  ASSIGN_OR_RETURN(const auto session, impl_->Find(trainer, id));
  RETURN_IF_ERROR(session->Close(trainer, rank));
  const absl::Status released = session->by_handle() ? session->ReleaseGone() : absl::OkStatus();
  absl::MutexLock lock(&impl_->mu);
  impl_->Sweep();
  return released;
}

void SessionTable::OnTrainerGone(AttachmentId attachment) {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    absl::MutexLock lock(&impl_->mu);
    for (const auto& [id, session] : impl_->by_id) sessions.push_back(session);
  }
  bool any = false;
  for (const auto& session : sessions) {
    if (!session->TrainerGone(attachment)) continue;
    any = true;
    if (!session->by_handle()) continue;
    impl_->closer.Post(
        absl::StrFormat("session '%s': letting go of the memory of the dead", session->name()),
        [session] { return session->ReleaseGone(); });
  }
  if (!any) return;
  absl::MutexLock lock(&impl_->mu);
  impl_->Sweep();
}

std::vector<SessionDescription> SessionTable::List() const {
  std::vector<std::shared_ptr<Session>> sessions;
  {
    absl::MutexLock lock(&impl_->mu);
    for (const auto& [id, session] : impl_->by_id) sessions.push_back(session);
  }
  std::vector<SessionDescription> out;
  for (const auto& session : sessions) out.push_back(session->Describe());
  if (draining()) {
    for (SessionDescription& d : out) {
      if (d.state != SessionState::kDegraded) d.state = SessionState::kDraining;
    }
  }
  return out;
}

// By name; a failed one whose ranks have not all left is found while nobody else has taken its name.
std::shared_ptr<Session> SessionTable::Impl::Named(const std::string& name) const {
  if (const auto it = by_name.find(name); it != by_name.end()) return it->second;
  for (const auto& [id, session] : by_id) {
    if (session->name() == name) return session;
  }
  return nullptr;
}

absl::StatusOr<std::shared_ptr<Session>> SessionTable::Impl::FindNamed(
    const std::string& name) const {
  absl::MutexLock lock(&mu);
  std::shared_ptr<Session> session = Named(name);
  if (session == nullptr) return absl::NotFoundError(absl::StrFormat("no session '%s'", name));
  return session;
}

absl::StatusOr<SessionDescription> SessionTable::Describe(const std::string& name) const {
  ASSIGN_OR_RETURN(const auto session, impl_->FindNamed(name));
  return session->Describe();
}

absl::StatusOr<std::vector<StepReport>> SessionTable::Steps(const std::string& name, uint64_t after,
                                                            absl::Duration timeout) const {
  ASSIGN_OR_RETURN(const auto session, impl_->FindNamed(name));
  std::vector<StepReport> reports = session->Steps(after, timeout);
  if (reports.empty() && !session->failure().ok()) {
    return absl::NotFoundError(
        absl::StrFormat("session '%s' has ended: %s", name, session->failure().message()));
  }
  return reports;
}

absl::StatusOr<StepReport> SessionTable::DescribeStep(const std::string& name,
                                                      uint64_t step) const {
  ASSIGN_OR_RETURN(const auto session, impl_->FindNamed(name));
  return session->StepResult(step, /*with_blocks=*/true);
}

void SessionTable::StartDrain() {
  absl::MutexLock lock(&impl_->mu);
  impl_->draining = true;
}

bool SessionTable::draining() const {
  absl::MutexLock lock(&impl_->mu);
  return impl_->draining;
}

void SessionTable::FinishDrain(absl::Time deadline) {
  {
    absl::MutexLock lock(&impl_->mu);
    // No word comes when a step ends: look every so often, for a call that is made once in a daemon's life.
    const auto quiet = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(impl_->mu) {
      return std::none_of(impl_->by_id.begin(), impl_->by_id.end(),
                          [](const auto& entry) { return entry.second->StepUnderWay(); });
    };
    while (!quiet() && absl::Now() < deadline) {
      impl_->mu.AwaitWithTimeout(absl::Condition(&quiet), absl::Milliseconds(20));
    }
  }
  std::vector<std::shared_ptr<Session>> sessions;
  {
    absl::MutexLock lock(&impl_->mu);
    for (const auto& [id, session] : impl_->by_id) sessions.push_back(session);
  }
  for (const auto& session : sessions) {
    session->Fail(absl::UnavailableError(
        absl::StrFormat("session '%s': the daemon was drained", session->name())));
  }
}

int SessionTable::size() const {
  absl::MutexLock lock(&impl_->mu);
  return static_cast<int>(impl_->by_id.size());
}

}  // namespace dmuon::server
