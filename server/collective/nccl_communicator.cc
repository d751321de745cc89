#include "server/collective/nccl_communicator.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/fnv1a.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "kernels/cuda/status.h"
#include "kernels/cuda/stream.h"
#include "server/collective/nccl_status.h"

namespace dmuon::server {
namespace {

using cuda::ToStatus;

constexpr int kExitStuck = 70;
constexpr absl::Duration kBusyPause = absl::Microseconds(20);
constexpr absl::Duration kIdlePause =
    absl::Milliseconds(50);  // an error of an idle epoch is seen this late

absl::string_view Name(Movement movement) {
  switch (movement) {
    case Movement::kSum: return "sum";
    case Movement::kSumTo: return "sum to one";
    case Movement::kBroadcast: return "broadcast";
    case Movement::kGather: return "gather";
    case Movement::kSend: return "send";
  }
  return "?";
}

std::string Text(const Exchange& e) {
  return absl::StrCat(Name(e.movement), " of ", e.count, " ", dmuon::Name(e.dtype), ", root ",
                      e.root, e.movement == Movement::kSend ? absl::StrCat(", to ", e.peer) : "");
}

bool Same(const Exchange& a, const Exchange& b) {
  return a.movement == b.movement && a.root == b.root && a.peer == b.peer && a.dtype == b.dtype &&
         a.count == b.count;
}

uint64_t Extend(uint64_t digest, const Exchange& e) {
  Fnv1a hash;
  hash.Add(digest);
  hash.Add(static_cast<uint64_t>(e.movement));
  hash.Add(static_cast<uint64_t>(e.root));
  hash.Add(static_cast<uint64_t>(e.peer));
  hash.Add(static_cast<uint64_t>(e.dtype));
  hash.Add(static_cast<uint64_t>(e.count));
  return hash.value();
}

absl::Status Check(const DeviceCommunicatorOptions& options) {
  const int ranks = static_cast<int>(options.devices.size());
  if (options.id.size() != sizeof(ncclUniqueId))
    return absl::InvalidArgumentError(
        absl::StrCat("an id of ", options.id.size(), " bytes, expected ", sizeof(ncclUniqueId)));
  for (int a = 0; a < ranks; ++a) {
    for (int b = 0; b < a; ++b) {
      if (options.devices[a] == options.devices[b])
        return absl::InvalidArgumentError(absl::StrCat("ranks ", b, " and ", a, " are both on ",
                                                       options.devices[a], "; NCCL takes one"));
    }
  }
  if (options.local.empty()) return absl::InvalidArgumentError("no rank of this process");
  std::set<int> seen;
  for (const auto& local : options.local) {
    if (local.rank < 0 || local.rank >= ranks || !seen.insert(local.rank).second)
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", local.rank, " of this process, of ", ranks, " ranks"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceCommunicator>> NcclCommunicator::Create(
    const DeviceCommunicatorOptions& options) {
  RETURN_IF_ERROR(Check(options));
  auto made = std::unique_ptr<NcclCommunicator>(new NcclCommunicator(options));
  NcclCommunicator& c = *made;
  c.watching_ = std::thread([&c] { c.Watch(); });
  c.issuing_ = std::thread([&c] { c.Run(); });
  return std::unique_ptr<DeviceCommunicator>(std::move(made));
}

NcclCommunicator::NcclCommunicator(const DeviceCommunicatorOptions& options) : options_(options) {
  const auto ring = static_cast<size_t>(options_.most_under_way);
  issued_time_.resize(ring);
  for (const auto& [rank, device] : options_.local)
    locals_.push_back(std::make_unique<NcclRank>(rank, device, ring));
}

NcclCommunicator::~NcclCommunicator() {
  {
    absl::MutexLock lock(&mu_);
    closing_ = true;
  }
  if (issuing_.joinable()) issuing_.join();
  if (watching_.joinable()) watching_.join();
}

// ---- what others call

DeviceCommunicator::State NcclCommunicator::state() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

bool NcclCommunicator::formed() const {
  absl::MutexLock lock(&mu_);
  return formed_;
}

absl::Status NcclCommunicator::cause() const {
  absl::MutexLock lock(&mu_);
  return cause_;
}

NcclRank* NcclCommunicator::Find(int rank) const {
  for (const auto& local : locals_) {
    if (local->rank == rank) return local.get();
  }
  return nullptr;
}

uint64_t NcclCommunicator::digest(int rank) const {
  const NcclRank* local = Find(rank);
  return local == nullptr ? 0 : local->digest;
}

absl::StatusOr<uint64_t> NcclCommunicator::Submit(int rank, kernels::Stream stream,
                                                  const Exchange& exchange) {
  {
    absl::MutexLock lock(&mu_);
    RETURN_IF_ERROR(cause_);
    if (state_ != State::kReady)
      return absl::FailedPreconditionError("the communicator is not formed yet");
  }
  NcclRank* local = Find(rank);
  if (local == nullptr)
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " is not of this process"));
  const uint64_t number = local->submitted.load(std::memory_order_relaxed) + 1;
  if (number - local->ended.load(std::memory_order_acquire) >
      static_cast<uint64_t>(options_.most_under_way)) {
    return absl::FailedPreconditionError(
        absl::StrCat(options_.most_under_way, " exchanges of rank ", rank, " are under way"));
  }
  local->exchanges[SlotOf(number)] = exchange;
  RETURN_IF_ERROR(ToStatus(cudaEventRecord(local->submitted_at[SlotOf(number)],
                                           static_cast<cuda::StreamState*>(stream.handle)->get()),
                           "marking the stream before an exchange"));
  local->digest = Extend(local->digest, exchange);
  local->submitted.store(number, std::memory_order_release);
  absl::MutexLock lock(&mu_);
  news_ = true;
  return number;
}

absl::StatusOr<bool> NcclCommunicator::Ended(int rank, uint64_t number) const {
  const NcclRank* local = Find(rank);
  if (local == nullptr)
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " is not of this process"));
  if (local->ended.load(std::memory_order_acquire) >= number) return true;
  absl::MutexLock lock(&mu_);
  // Until the library has let go, the memory of an exchange is still its.
  if (state_ == State::kAborted) return cause_;
  return false;
}

void NcclCommunicator::Abort(const absl::Status& cause) {
  absl::MutexLock lock(&mu_);
  if (cause_.ok()) cause_ = cause;
}

// ---- the issuing thread

template <typename F>
auto NcclCommunicator::Call(absl::string_view what, const F& call) {
  {
    absl::MutexLock lock(&mu_);
    calling_ = what;
    called_ = absl::Now();
  }
  const auto result = call();
  absl::MutexLock lock(&mu_);
  called_ = absl::InfiniteFuture();
  return result;
}

absl::Status NcclCommunicator::Cancelled() const {
  absl::MutexLock lock(&mu_);
  return closing_ && cause_.ok() ? absl::CancelledError("the communicator is being closed")
                                 : cause_;
}

void NcclCommunicator::Run() {
  absl::Status status = Form();
  if (status.ok()) {
    absl::MutexLock lock(&mu_);
    formed_ = cause_.ok();
    if (formed_) state_ = State::kReady;
  }
  while (status.ok()) status = Turn();
  absl::Status cause;
  {
    absl::MutexLock lock(&mu_);
    // A communicator that is closed tells nobody. Else the first cause counts.
    const bool closed = closing_ && cause_.ok();
    if (!closed && cause_.ok()) cause_ = Annotate(status, absl::StrCat("epoch ", options_.epoch));
    cause = cause_;
  }
  if (!cause.ok()) {
    Log(LogLevel::kWarning, "communicator_aborted",
        {{"epoch", options_.epoch}, {"cause", cause.message()}});
    if (options_.on_abort) options_.on_abort(cause);
    AbortAll();
  } else {
    CloseAll();
  }
  absl::MutexLock lock(&mu_);
  state_ = State::kAborted;
  if (cause_.ok()) cause_ = absl::CancelledError("the communicator is closed");
  finished_ = true;
}

absl::Status NcclCommunicator::Form() {
  for (const auto& local : locals_) RETURN_IF_ERROR(local->Prepare());
  ncclUniqueId id;
  std::copy(options_.id.begin(), options_.id.end(), id.internal);
  const int ranks = static_cast<int>(options_.devices.size());
  RETURN_IF_ERROR(
      Grouped("forming the communicator", "ncclCommInitRankConfig", [&](NcclRank& local) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        return ncclCommInitRankConfig(&local.communicator, ranks, id, local.rank, &config);
      }));
  const std::string here = absl::StrJoin(
      locals_, ", ", [](std::string* out, const auto& l) { absl::StrAppend(out, l->rank); });
  return Settle(absl::StrCat("forming the communicator of ", ranks, " ranks (here: ", here, ")"),
                options_.join_timeout);
}

// One group of NCCL, closed again whatever happens inside.
absl::Status NcclCommunicator::Grouped(absl::string_view doing, absl::string_view what,
                                       absl::FunctionRef<ncclResult_t(NcclRank&)> call) {
  RETURN_IF_ERROR(NcclStatus(Call("ncclGroupStart", [] { return ncclGroupStart(); }), doing));
  absl::Status status;
  for (const auto& local : locals_) {
    if (status.ok()) status = ToStatus(cudaSetDevice(local->device), "selecting the device");
    if (status.ok()) status = NcclStatus(Call(what, [&] { return call(*local); }), doing);
  }
  const ncclResult_t ended = Call("ncclGroupEnd", [] { return ncclGroupEnd(); });
  return status.ok() ? NcclStatus(ended, doing) : status;
}

absl::StatusOr<bool> NcclCommunicator::InProgress(absl::string_view doing) {
  bool in_progress = false;
  for (const auto& local : locals_) {
    if (local->communicator == nullptr) continue;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = Call("ncclCommGetAsyncError", [&] {
      return ncclCommGetAsyncError(local->communicator, &state);
    });
    const std::string who = absl::StrCat(doing, ": rank ", local->rank);
    RETURN_IF_ERROR(NcclStatus(asked, who));
    RETURN_IF_ERROR(NcclStatus(state, who));
    in_progress |= state == ncclInProgress;
  }
  return in_progress;
}

absl::Status NcclCommunicator::Settle(absl::string_view doing, absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  while (true) {
    ASSIGN_OR_RETURN(const bool in_progress, InProgress(doing));
    if (!in_progress) return absl::OkStatus();
    RETURN_IF_ERROR(Cancelled());
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(doing, ": not done after ", absl::FormatDuration(patience)));
    }
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(this, &NcclCommunicator::Interrupted), kBusyPause);
  }
}

// Issues what can be issued, and looks at what was. Waits a little when there is nothing to do.
absl::Status NcclCommunicator::Turn() {
  RETURN_IF_ERROR(Cancelled());
  const auto submitted_by_all = [this] {
    return std::all_of(locals_.begin(), locals_.end(), [this](const auto& local) {
      return local->submitted.load(std::memory_order_acquire) > issued_;
    });
  };
  while (submitted_by_all()) RETURN_IF_ERROR(IssueNext());
  RETURN_IF_ERROR(CollectEnded());
  RETURN_IF_ERROR(
      InProgress(ended_ < issued_ ? Describe(ended_ + 1) : "between exchanges").status());
  if (ended_ < issued_ &&
      absl::Now() - issued_time_[SlotOf(ended_ + 1)] > options_.exchange_timeout) {
    return absl::DeadlineExceededError(
        absl::StrCat(Describe(ended_ + 1), " has not ended after ",
                     absl::FormatDuration(options_.exchange_timeout)));
  }
  absl::MutexLock lock(&mu_);
  mu_.AwaitWithTimeout(absl::Condition(this, &NcclCommunicator::Interrupted),
                       ended_ < issued_ ? kBusyPause : kIdlePause);
  news_ = false;
  return absl::OkStatus();
}

std::string NcclCommunicator::Describe(uint64_t number) const {
  return absl::StrCat("exchange ", number, " (", Text(locals_[0]->exchanges[SlotOf(number)]), ")");
}

// NCCL does not notice ranks that differ: it hangs, or moves the wrong bytes.
absl::Status NcclCommunicator::Agree(uint64_t number) const {
  const Exchange& first = locals_[0]->exchanges[SlotOf(number)];
  for (const auto& local : locals_) {
    const Exchange& other = local->exchanges[SlotOf(number)];
    if (Same(first, other)) continue;
    return absl::InternalError(absl::StrCat("exchange ", number, ": rank ", locals_[0]->rank,
                                            " submitted ", Text(first), "; rank ", local->rank,
                                            " submitted ", Text(other)));
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::IssueNext() {
  const uint64_t number = issued_ + 1;
  const size_t slot = SlotOf(number);
  RETURN_IF_ERROR(Agree(number));
  for (const auto& local : locals_) {
    RETURN_IF_ERROR(ToStatus(cudaStreamWaitEvent(local->stream, local->submitted_at[slot], 0),
                             "ordering an exchange"));
  }
  RETURN_IF_ERROR(Grouped(Describe(number), "an NCCL operation", [&](NcclRank& local) {
    return local.Issue(local.exchanges[slot], static_cast<int>(options_.devices.size()));
  }));
  const absl::Time now = absl::Now();
  RETURN_IF_ERROR(Settle(absl::StrCat("issuing ", Describe(number)), options_.exchange_timeout));
  for (const auto& local : locals_) {
    RETURN_IF_ERROR(ToStatus(cudaSetDevice(local->device), "selecting the device"));
    RETURN_IF_ERROR(ToStatus(cudaEventRecord(local->ended_at[slot], local->stream),
                             "marking the end of an exchange"));
  }
  issued_time_[slot] = now;
  issued_ = number;
  return absl::OkStatus();
}

absl::Status NcclCommunicator::CollectEnded() {
  uint64_t all = issued_;
  for (const auto& local : locals_) {
    uint64_t ended = local->ended.load(std::memory_order_relaxed);
    while (ended < issued_) {
      const cudaError_t error = cudaEventQuery(local->ended_at[SlotOf(ended + 1)]);
      if (error == cudaErrorNotReady) break;
      RETURN_IF_ERROR(ToStatus(error, Describe(ended + 1)));
      ++ended;
    }
    local->ended.store(ended, std::memory_order_release);
    all = std::min(all, ended);
  }
  ended_ = all;
  return absl::OkStatus();
}

// The orderly end, of an epoch in which nothing is under way.
void NcclCommunicator::CloseAll() {
  absl::Status status =
      ended_ == issued_ ? absl::OkStatus() : absl::CancelledError("closed under exchanges");
  if (status.ok()) {
    status = Grouped("closing", "ncclCommFinalize",
                     [](NcclRank& local) { return ncclCommFinalize(local.communicator); });
  }
  const absl::Time deadline = absl::Now() + options_.abort_timeout;
  while (status.ok()) {
    const absl::StatusOr<bool> in_progress = InProgress("closing");
    status = in_progress.status();
    if (!status.ok() || !*in_progress) break;
    if (absl::Now() > deadline) status = absl::DeadlineExceededError("closing");
  }
  for (const auto& local : locals_) {
    if (!status.ok()) break;
    status = NcclStatus(
        Call("ncclCommDestroy", [&] { return ncclCommDestroy(local->communicator); }), "closing");
    if (status.ok()) local->communicator = nullptr;
  }
  AbortAll();  // what could not be closed, and the streams
}

void NcclCommunicator::AbortAll() {
  // As one group: an abort may wait for the whole device, where an operation of the next communicator still hangs. A group
  // that cannot be opened is no reason not to abort.
  (void)Call("ncclGroupStart", [] { return ncclGroupStart(); });
  for (const auto& local : locals_) {
    if (local->communicator == nullptr) continue;
    const ncclResult_t result = Call("ncclCommAbort", [&] {
      return ncclCommAbort(std::exchange(local->communicator, nullptr));
    });
    if (result != ncclSuccess && result != ncclInProgress) {
      Log(LogLevel::kWarning, "communicator_not_aborted",
          {{"rank", local->rank}, {"reason", NcclStatus(result, "ncclCommAbort").message()}});
    }
  }
  (void)Call("ncclGroupEnd", [] { return ncclGroupEnd(); });
  for (const auto& local : locals_) {
    // Once aborted, what was on the stream ends; until then its memory is in use.
    if (cudaSetDevice(local->device) != cudaSuccess) continue;
    if (local->stream != nullptr) {
      (void)Call("cudaStreamSynchronize", [&] { return cudaStreamSynchronize(local->stream); });
      (void)cudaStreamDestroy(std::exchange(local->stream, nullptr));
    }
  }
}

// ---- the watching thread

void NcclCommunicator::Watch() {
  std::string what;
  {
    absl::MutexLock lock(&mu_);
    while (!finished_ && absl::Now() - called_ <= options_.abort_timeout) {
      mu_.AwaitWithTimeout(absl::Condition(&finished_), options_.abort_timeout / 4);
    }
    if (finished_) return;
    what = absl::StrCat("epoch ", options_.epoch, ": ", calling_, " has not returned after ",
                        absl::FormatDuration(options_.abort_timeout));
  }
  Abort(absl::DeadlineExceededError(what));
  Log(LogLevel::kError, "communicator_stuck", {{"reason", what}});
  if (options_.on_stuck) return options_.on_stuck(absl::DeadlineExceededError(what));
  // Memory and threads that the library holds cannot be had back. State is on disk or in other daemons.
  std::_Exit(kExitStuck);
}

}  // namespace dmuon::server
