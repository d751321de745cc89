#include "server/memory/reaper.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/log.h"

namespace dmuon::server {

struct Reaper::Ticket::State {
  std::string what;
  absl::Time deadline;
  absl::Mutex mu;
  bool done ABSL_GUARDED_BY(mu) = false;
  absl::Status result ABSL_GUARDED_BY(mu);

  absl::Status Wait(absl::Duration timeout) {
    absl::MutexLock lock(&mu);
    if (mu.AwaitWithTimeout(absl::Condition(&done), timeout)) return result;
    return absl::DeadlineExceededError(
        absl::StrCat("the driver has not answered within ", absl::FormatDuration(timeout)));
  }
};

// Outlives the reaper when work does.
struct Reaper::Shared {
  absl::Mutex mu;
  std::vector<std::shared_ptr<Ticket::State>> open ABSL_GUARDED_BY(mu);
  bool stopping ABSL_GUARDED_BY(mu) = false;
  std::thread watcher;

  void Watch();
};

// Says which work is late, once. Work that ends in time leaves the list by itself.
void Reaper::Shared::Watch() {
  absl::MutexLock lock(&mu);
  for (;;) {
    // Deadlines are in the order of posting.
    const std::shared_ptr<Ticket::State> next = open.empty() ? nullptr : open.front();
    if (next == nullptr && stopping) return;
    const absl::Time until = next == nullptr ? absl::InfiniteFuture() : next->deadline;
    const auto changed = [this, &next]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
      return next == nullptr ? stopping || !open.empty() : open.empty() || open.front() != next;
    };
    if (mu.AwaitWithDeadline(absl::Condition(&changed), until)) continue;
    Log(LogLevel::kWarning, "work_left_behind",
        {{"what", next->what}, {"reason", "the driver has not answered by the deadline"}});
    open.erase(open.begin());
  }
}

absl::Status Reaper::Ticket::Wait(absl::Duration timeout) const { return state_->Wait(timeout); }

Reaper::Reaper(absl::Duration deadline) : deadline_(deadline), shared_(std::make_shared<Shared>()) {
  shared_->watcher = std::thread([shared = shared_.get()] { shared->Watch(); });
}

Reaper::~Reaper() {
  {
    absl::MutexLock lock(&shared_->mu);
    shared_->stopping = true;
  }
  shared_->watcher.join();
}

Reaper::Ticket Reaper::Post(std::string what, std::function<absl::Status()> work) {
  Ticket ticket;
  ticket.state_ = std::make_shared<Ticket::State>();
  ticket.state_->what = std::move(what);
  ticket.state_->deadline = absl::Now() + deadline_;
  {
    absl::MutexLock lock(&shared_->mu);
    shared_->open.push_back(ticket.state_);
  }
  std::thread([shared = shared_, state = ticket.state_, work = std::move(work)]() mutable {
    const absl::Status result = work();
    work = nullptr;
    absl::MutexLock lock(&shared->mu);
    shared->open.erase(std::remove(shared->open.begin(), shared->open.end(), state),
                       shared->open.end());
    absl::MutexLock done(&state->mu);
    state->result = result;
    state->done = true;
  }).detach();
  return ticket;
}

}  // namespace dmuon::server
