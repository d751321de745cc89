// The memory that a session shares with its trainers: made here, or made by them and mapped here.

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/session/namespaces.h"
#include "server/session/session.h"

namespace dmuon::server {
namespace {

// What a driver says of a handle that it does not take is as good as nothing where containers are in the way.
absl::Status WithNamespaces(const absl::Status& refused, pid_t trainer) {
  const std::string apart = refused.ok() ? "" : NamespacesApart(trainer);
  if (apart.empty()) return refused;
  return absl::Status(refused.code(),
                      absl::StrFormat("%s; trainer (process %d) and daemon have different %s "
                                      "namespaces, which CUDA's handles may not cross",
                                      refused.message(), trainer, apart));
}

}  // namespace

absl::Status Session::BuildArenas() {
  const wire::PageLayout page =
      wire::PageLayout::For(static_cast<uint32_t>(context_.table.boundaries.size()),
                            static_cast<uint32_t>(context_.table.parameters.size()),
                            static_cast<uint32_t>(context_.optimizer.groups.size()));
  for (int s = 0; s < context_.slots(); ++s) {
    SlotArenas arenas;
    ASSIGN_OR_RETURN(arenas.control, SealedMemory::Create("dmuon-control", page.bytes));
    if (!by_handle_) {
      ASSIGN_OR_RETURN(SealedMemory grad,
                       SealedMemory::Create("dmuon-grad", context_.layout.grad_bytes));
      ASSIGN_OR_RETURN(SealedMemory weight,
                       SealedMemory::Create("dmuon-weight", context_.layout.weight_bytes));
      arenas.grad = server::Arena(std::move(grad));
      arenas.weight = server::Arena(std::move(weight));
    }
    arenas.page = wire::ControlPage::Create(arenas.control.data(), page, context_.table_digest);
    arenas.page.header().epoch.store(StepContext::kEpoch);
    context_.arenas.push_back(std::move(arenas));
  }
  context_.arenas_there = !by_handle_;
  return absl::OkStatus();
}

absl::StatusOr<ArenaHandle> Session::Arena(const Trainer& trainer, int rank, wire::ArenaKind kind) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckRank(trainer, rank));
  if (!built_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': it is not configured yet", name()));
  }
  const SlotArenas& arenas = context_.arenas[rank];
  const SealedMemory* memory = nullptr;
  switch (kind) {
    case wire::ArenaKind::kControl: memory = &arenas.control; break;
    case wire::ArenaKind::kGrad: memory = arenas.grad.sealed(); break;
    case wire::ArenaKind::kWeight: memory = arenas.weight.sealed(); break;
    case wire::ArenaKind::kUnspecified: break;
  }
  if (memory == nullptr) {
    if (by_handle_ && kind != wire::ArenaKind::kUnspecified) {
      return absl::FailedPreconditionError(
          "arena: this daemon computes on GPUs: the trainer allocates it and registers its handle");
    }
    return absl::InvalidArgumentError("arena: not one of the known kinds");
  }
  UniqueFd fd(fcntl(memory->fd(), F_DUPFD_CLOEXEC, 0));
  if (!fd.valid()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("duplicating a descriptor: %s", strerror(errno)));
  }
  return ArenaHandle{std::move(fd), memory->size()};
}

absl::StatusOr<Registered> Session::Register(const Trainer& trainer, int rank,
                                             const Registration& registration) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckRank(trainer, rank));
  if (!built_) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': it is not configured yet", name()));
  }
  RETURN_IF_ERROR(
      CheckBuffers(registration.buffers,
                   {.control_bytes = context_.arenas[rank].control.size(),
                    .grad_bytes = context_.layout.grad_bytes,
                    .weight_bytes = context_.layout.weight_bytes,
                    .by_handle = by_handle_,
                    .device = by_handle_ ? context_.backends[rank]->device() : std::string()}));
  if (by_handle_) return Import(trainer, rank, registration);
  ASSIGN_OR_RETURN(const uint64_t step, BecomeReady(rank));
  return Registered{step, {}};
}

absl::StatusOr<Registered> Session::Import(const Trainer& trainer, int rank,
                                           const Registration& registration) {
  if (ranks_[rank].importing || ranks_[rank].imported.has_value() || registering_.here[rank]) {
    return absl::FailedPreconditionError(
        absl::StrFormat("session '%s': rank %d has already registered its buffers", name(), rank));
  }
  kernels::Backend& backend = *context_.backends[rank];
  ranks_[rank].importing = true;
  mu_.Unlock();  // a driver is at work
  absl::StatusOr<ImportedArenas> imported = ImportedArenas::Import(backend, registration);
  absl::Status status = WithNamespaces(imported.status(), trainer.pid);
  if (status.ok()) {
    absl::Status written;
    status = workers_[rank]->Run(0, [&](kernels::Stream stream) {
      written = imported->WriteProbes(backend, stream);
      if (!written.ok()) Settle(backend, stream);
    });
    status.Update(written);
  }
  mu_.Lock();
  ranks_[rank].importing = false;
  status.Update(CheckRank(trainer, rank));
  if (imported.ok()) ranks_[rank].imported = *std::move(imported);
  if (!status.ok()) {
    CloseArenas(rank);
    return Annotate(status, absl::StrFormat("session '%s': rank %d", name(), rank));
  }
  return Registered{context_.answered_step.load(), ranks_[rank].imported->probes()};
}

absl::StatusOr<uint64_t> Session::Confirm(const Trainer& trainer, int rank,
                                          const std::vector<std::string>& found) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckRank(trainer, rank));
  if (!ranks_[rank].imported.has_value()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "session '%s': rank %d: expected RegisterBuffers with handles before it", name(), rank));
  }
  if (const absl::Status same = ranks_[rank].imported->CheckFound(found); !same.ok()) {
    CloseArenas(rank);
    return Annotate(WithNamespaces(same, trainer.pid),
                    absl::StrFormat("session '%s': rank %d", name(), rank));
  }
  return BecomeReady(rank);
}

absl::StatusOr<uint64_t> Session::BecomeReady(int rank) {
  RETURN_IF_ERROR(Gather(registering_, rank, absl::Now() + formation_timeout_,
                         "registering buffers",
                         [this] { return by_handle_ ? Adopt() : absl::OkStatus(); }));
  if (state_ == SessionState::kOpen) {
    state_ = SessionState::kReady;
    Log(LogLevel::kInfo, "session_ready", {{"session", name()}, {"ranks", context_.slots()}});
  }
  return context_.answered_step.load();
}

// Every rank's arenas are mapped and probed: the workers may use them, and publish into them what they have.
absl::Status Session::Adopt() {
  {
    absl::MutexLock lock(&mu_);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (!ranks_[r].imported.has_value()) continue;  // it died meanwhile
      context_.arenas[r].grad = server::Arena(std::move(ranks_[r].imported->grad));
      context_.arenas[r].weight = server::Arena(std::move(ranks_[r].imported->weight));
      ranks_[r].imported.reset();
    }
  }
  context_.arenas_there = true;
  absl::MutexLock lock(&publishing_);
  for (int s = 0; s < context_.slots(); ++s) {
    RETURN_IF_ERROR(workers_[s]->Publish(context_.plan.owned[s]));
  }
  return absl::OkStatus();
}

// Hands the mappings of this rank to the reaper. Nobody uses them any more.
void Session::CloseArenas(int rank) {
  std::vector<std::shared_ptr<kernels::ImportedMemory>> mappings;
  if (ranks_[rank].imported.has_value()) {
    mappings.push_back(std::move(ranks_[rank].imported->grad));
    mappings.push_back(std::move(ranks_[rank].imported->weight));
    ranks_[rank].imported.reset();
  }
  if (static_cast<size_t>(rank) < context_.arenas.size()) {
    mappings.push_back(context_.arenas[rank].grad.Release());
    mappings.push_back(context_.arenas[rank].weight.Release());
  }
  for (auto& mapping : mappings) {
    if (mapping == nullptr) continue;
    ranks_[rank].closing.push_back(
        reaper_.Post(absl::StrFormat("session '%s': closing an arena of rank %d", name(), rank),
                     [mapping = std::move(mapping)] { return mapping->Close(); }));
  }
}

absl::Status Session::ReleaseGone() {
  std::vector<int> gone;
  {
    absl::MutexLock lock(&mu_);
    if (!built_) return absl::OkStatus();
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].came && !ranks_[r].alive) gone.push_back(static_cast<int>(r));
    }
    for (int r : gone) context_.withdrawn[r] = true;
  }
  // What a worker has enqueued before it saw that is over, and nothing follows.
  for (const auto& worker : workers_) worker->Quiesce();
  std::vector<Reaper::Ticket> closing;
  {
    absl::MutexLock lock(&mu_);
    for (int r : gone) {
      if (!ranks_[r].importing) CloseArenas(r);
      closing.insert(closing.end(), ranks_[r].closing.begin(), ranks_[r].closing.end());
    }
  }
  for (const Reaper::Ticket& ticket : closing) {
    const absl::Status closed = ticket.Wait(reaper_.deadline());
    if (closed.ok()) continue;
    return absl::Status(closed.code(),
                        absl::StrFormat("session '%s': its arenas are not closed and must not be "
                                        "freed: %s",
                                        name(), closed.message()));
  }
  return absl::OkStatus();
}

}  // namespace dmuon::server
