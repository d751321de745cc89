#include "server/collective/exchange_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

constexpr absl::Duration kLookAgain = absl::Milliseconds(5);

// What was appended of a boundary, in one word.
uint64_t Appended(uint64_t generation, uint32_t micros) { return generation << 16 | micros; }

const bool kNever = false;

}  // namespace

ExchangeQueue::ExchangeQueue(const Plan& plan, DeviceCommunicators& library,
                             DeviceCommunicatorOptions options)
    : plan_(plan),
      library_(library),
      options_(std::move(options)),
      slots_(static_cast<int>(options_.devices.size())),
      reserve_(2 * plan.transfers.size()),
      entries_(6 * plan.transfers.size()),
      appended_(new std::atomic<uint64_t>[plan.parameters.size()]()),
      passed_(options_.devices.size(), 0),
      finished_(options_.devices.size(), 0) {}

// ---- epochs

absl::StatusOr<std::unique_ptr<DeviceCommunicator>> ExchangeQueue::MakeCommunicator(
    uint64_t epoch) {
  DeviceCommunicatorOptions options = options_;
  options.epoch = epoch;
  ASSIGN_OR_RETURN(options.id, library_.NewId());
  return library_.Create(options);
}

absl::Status ExchangeQueue::Form() {
  ASSIGN_OR_RETURN(communicator_, MakeCommunicator(1));
  {
    absl::MutexLock lock(&mu_);
    while (communicator_->state() == DeviceCommunicator::State::kForming) {
      mu_.AwaitWithTimeout(absl::Condition(&kNever), kLookAgain);
    }
    epoch_ = {.number = 1, .communicator = communicator_.get()};
  }
  number_.store(1, std::memory_order_release);
  return communicator_->cause();
}

ExchangeQueue::Epoch ExchangeQueue::current() const {
  absl::MutexLock lock(&mu_);
  return epoch_;
}

absl::Status ExchangeQueue::Leave(uint64_t submitted) {
  {
    absl::MutexLock lock(&mu_);
    submitted_ = std::max(submitted_, submitted);
    if (++left_ < slots_) return absl::OkStatus();
  }
  return Renew();
}

// No slot is in an epoch: nothing here is used but by this thread, and entries that are appended wait.
absl::Status ExchangeQueue::Renew() {
  const absl::Status cause = communicator_->cause();
  uint64_t first = 0, number = 0;
  {
    absl::MutexLock lock(&mu_);
    first = *std::min_element(passed_.begin(), passed_.end());
    number = epoch_.number + 1;
    if (epoch_.number > 1 && first == epoch_.first) {
      return Annotate(cause, "two epochs in a row moved nothing");
    }
  }
  if (!communicator_->formed()) return cause;
  communicator_.reset();
  ASSIGN_OR_RETURN(communicator_, MakeCommunicator(number));
  absl::MutexLock lock(&mu_);
  epoch_ = {number, communicator_.get(), first, submitted_, cause};
  std::fill(passed_.begin(), passed_.end(), first);
  left_ = 0;
  number_.store(number, std::memory_order_release);
  return absl::OkStatus();
}

// ---- entries

uint64_t ExchangeQueue::Free() const {
  const uint64_t used =
      end_.load(std::memory_order_relaxed) - *std::min_element(passed_.begin(), passed_.end());
  return entries_.size() - used;
}

void ExchangeQueue::Append(const QueuedExchange& entry) {
  const uint64_t position = end_.load(std::memory_order_relaxed);
  entries_[position % entries_.size()] = entry;
  end_.store(position + 1, std::memory_order_release);
}

bool ExchangeQueue::AppendGradients(BoundaryId boundary, uint64_t generation,
                                    absl::FunctionRef<uint32_t()> micros, bool& changed) {
  std::atomic<uint64_t>& word = appended_[boundary.index()];
  if (word.load(std::memory_order_acquire) >= Appended(generation, micros())) return true;
  const std::vector<ParameterId>& parameters = plan_.parameters[boundary.index()];
  absl::MutexLock lock(&mu_);
  uint64_t before = std::max(word.load(std::memory_order_relaxed), Appended(generation, 0));
  // Asked again under the lock: what one slot still sees of an old generation never comes behind a new one.
  for (; before < Appended(generation, micros()); ++before) {
    if (Free() < parameters.size() + reserve_) return false;
    for (ParameterId p : parameters) {
      Append({.kind = QueuedExchange::Kind::kGradient,
              .parameter = p,
              .generation = generation,
              .micro = static_cast<uint32_t>(before & 0xffff),
              .last = p == parameters.back()});
    }
    word.store(before + 1, std::memory_order_release);
    changed = true;
  }
  return true;
}

uint64_t ExchangeQueue::AppendWeight(ParameterId parameter) {
  absl::MutexLock lock(&mu_);
  Append({.kind = QueuedExchange::Kind::kWeight, .parameter = parameter});
  return end_.load(std::memory_order_relaxed);
}

std::optional<uint64_t> ExchangeQueue::AppendWindow(absl::Span<const ParameterId> parameters,
                                                    SlotId to) {
  absl::MutexLock lock(&mu_);
  if (Free() < parameters.size() + reserve_) return std::nullopt;
  for (ParameterId p : parameters) {
    if (plan_.transfers[p.index()].owner == to) continue;
    Append({.kind = QueuedExchange::Kind::kWindow, .parameter = p, .to = to});
  }
  return end_.load(std::memory_order_relaxed);
}

void ExchangeQueue::Finish(SlotId slot, uint64_t position) {
  absl::MutexLock lock(&mu_);
  passed_[slot.index()] = position;
  finished_[slot.index()] = std::max(finished_[slot.index()], position);
  finished_by_all_.store(*std::min_element(finished_.begin(), finished_.end()),
                         std::memory_order_release);
}

absl::Status ExchangeQueue::AwaitFinished(uint64_t position,
                                          absl::FunctionRef<absl::Status()> ended) const {
  const auto finished = [&] { return finished_by_all() >= position; };
  while (!finished()) {
    RETURN_IF_ERROR(ended());
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(&finished), kLookAgain);
  }
  return absl::OkStatus();
}

}  // namespace dmuon::server
