// A session's records and waits: everything that happens while training, without a message.
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/session_impl.h"

namespace dmuon::client {
namespace {

constexpr absl::Duration kRoomTick = absl::Milliseconds(1);

absl::Status CheckBoundary(const Session::Impl& s, int boundary) {
  if (boundary >= 0 && static_cast<size_t>(boundary) < s.boundaries.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("expected a boundary from 0 to %d, got %d",
                                                    static_cast<int>(s.boundaries.size()) - 1,
                                                    boundary));
}

// The verdict's own words, with its code.
absl::Status VerdictStatus(const wire::Verdict& verdict) {
  return absl::Status(
      static_cast<absl::StatusCode>(verdict.code),
      absl::string_view(verdict.reason, strnlen(verdict.reason, wire::kReasonBytes)));
}

}  // namespace

absl::Status Session::Impl::CheckStarted() const {
  RETURN_IF_ERROR(connection->CheckProcess());
  switch (phase.load(std::memory_order_acquire)) {
    case Phase::kStarted: return absl::OkStatus();
    case Phase::kLost: return absl::UnavailableError(absl::StrFormat("session '%s' is lost", job));
    case Phase::kClosed:
      return absl::FailedPreconditionError(absl::StrFormat("session '%s' is closed", job));
    case Phase::kOpened:
    case Phase::kConfigured: break;
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("session '%s': expected Start before this call", job));
}

absl::Status Session::Impl::Wait(absl::FunctionRef<bool()> done, absl::Duration tick) {
  const absl::Status status = WaitOnPage(page, *connection, done, tick);
  if (!status.ok() && !absl::IsCancelled(status)) phase = Phase::kLost;
  return status;
}

absl::Status Session::Impl::Push(wire::RecordType type,
                                 absl::FunctionRef<absl::Status(wire::Record&)> fill,
                                 absl::FunctionRef<void(const wire::Record&)> pushed) {
  const wire::PageHeader& header = page.header();
  for (;;) {
    {
      absl::MutexLock lock(&push_mu);
      wire::Record record;
      record.type = type;
      record.generation = generation;
      record.epoch = header.epoch.load(std::memory_order_acquire);
      record.table_digest = table_digest;
      RETURN_IF_ERROR(fill(record));
      if (page.Push(record)) {
        pushed(record);
        return absl::OkStatus();
      }
    }
    // The daemon does not ring for room: it makes it at once, unless it is stopped.
    RETURN_IF_ERROR(Wait(
        [&header, this] {
          return header.ring_tail.load(std::memory_order_acquire) -
                     header.ring_head.load(std::memory_order_acquire) <
                 page.layout().ring_capacity;
        },
        kRoomTick));
  }
}

void Session::Impl::NextGeneration(uint64_t next) {
  page.ClearPresence();
  backwards = 0;
  absl::MutexLock lock(&push_mu);
  micro.assign(micro.size(), 0);
  // Nobody's result depends on the old generation's gradients any more, read or not: all may be written over.
  last_use.assign(last_use.size(), {});
  generation = next;
}

absl::Status Session::WaitWeights(int boundary) {
  Impl& s = *impl_;
  RETURN_IF_ERROR(s.CheckStarted());
  RETURN_IF_ERROR(CheckBoundary(s, boundary));
  const auto& version = s.page.boundary(static_cast<uint32_t>(boundary)).weights_version;
  const auto& all =
      s.page.header().done_step;  // speaks for boundaries that carry no parameter, too
  const uint64_t wanted = s.step;
  return s.Wait([&] {
    return version.load(std::memory_order_acquire) >= wanted ||
           all.load(std::memory_order_acquire) >= wanted;
  });
}

absl::Status Session::WaitAllWeights() {
  RETURN_IF_ERROR(impl_->CheckStarted());
  for (size_t b = 0; b < impl_->boundaries.size(); ++b) {
    RETURN_IF_ERROR(WaitWeights(static_cast<int>(b)));
  }
  return absl::OkStatus();
}

absl::Status Session::Materialize(int boundary) {
  Impl& s = *impl_;
  RETURN_IF_ERROR(WaitWeights(boundary));
  // Whoever had the window may not have released it yet, and nothing is granted before. What other windows wait for is no
  // matter here: else no boundary's kernels would be launched before the device is done with the one before.
  RETURN_IF_ERROR(s.SettleWindow(boundary));
  const size_t b = static_cast<size_t>(boundary);
  uint64_t ticket = 0;
  const auto fill = [&](wire::Record& record) {
    s.push_mu.AssertHeld();
    const int holder = s.holder[static_cast<size_t>(s.window[b])];
    if (holder >= 0 && holder != boundary) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "boundary '%s': its window %d is held by boundary '%s', which was not released",
          s.boundaries[b].name, s.window[b], s.boundaries[static_cast<size_t>(holder)].name));
    }
    record.boundary = static_cast<uint32_t>(boundary);
    record.ticket = s.ticket + 1;
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(s.Push(wire::RecordType::kMaterialize, fill, [&](const wire::Record& record) {
    s.push_mu.AssertHeld();
    ticket = s.ticket = record.ticket;
    s.holder[static_cast<size_t>(s.window[b])] = boundary;
  }));
  const auto& grant = s.page.boundary(static_cast<uint32_t>(boundary)).window_grant;
  return s.Wait([&] { return grant.load(std::memory_order_acquire) >= ticket; });
}

absl::Status Session::Release(int boundary) {
  RETURN_IF_ERROR(impl_->CheckStarted());
  RETURN_IF_ERROR(CheckBoundary(*impl_, boundary));
  return impl_->PushRelease(boundary);
}

absl::Status Session::Impl::PushRelease(int boundary) {
  Impl& s = *this;
  const size_t b = static_cast<size_t>(boundary);
  const auto fill = [&](wire::Record& record) {
    s.push_mu.AssertHeld();
    if (s.holder[static_cast<size_t>(s.window[b])] != boundary) {
      return absl::FailedPreconditionError(
          absl::StrFormat("boundary '%s': released, but not materialised", s.boundaries[b].name));
    }
    record.boundary = static_cast<uint32_t>(boundary);
    return absl::OkStatus();
  };
  return s.Push(wire::RecordType::kRelease, fill, [&](const wire::Record&) {
    s.push_mu.AssertHeld();
    s.holder[static_cast<size_t>(s.window[b])] = -1;
  });
}

absl::Status Session::WaitGradWritable(int boundary) {
  Impl& s = *impl_;
  RETURN_IF_ERROR(s.CheckStarted());
  RETURN_IF_ERROR(CheckBoundary(s, boundary));
  RETURN_IF_ERROR(s.SettleWindow(boundary));
  Impl::LastUse last;
  {
    absl::MutexLock lock(&s.push_mu);
    last = s.last_use[static_cast<size_t>(s.window[static_cast<size_t>(boundary)])];
  }
  const auto& consumed = s.page.boundary(last.boundary).grads_consumed;
  return s.Wait([&] { return consumed.load(std::memory_order_acquire) >= last.mark; });
}

absl::Status Session::Ready(int boundary) {
  RETURN_IF_ERROR(impl_->CheckStarted());
  RETURN_IF_ERROR(CheckBoundary(*impl_, boundary));
  return impl_->PushReady(boundary);
}

absl::Status Session::Impl::PushReady(int boundary) {
  Impl& s = *this;
  const size_t b = static_cast<size_t>(boundary);
  const auto fill = [&](wire::Record& record) {
    s.push_mu.AssertHeld();
    if (s.micro[b] >= std::numeric_limits<uint16_t>::max()) {
      return absl::FailedPreconditionError(
          absl::StrFormat("boundary '%s': expected at most %d micro-batches in a step",
                          s.boundaries[b].name, std::numeric_limits<uint16_t>::max()));
    }
    record.boundary = static_cast<uint32_t>(boundary);
    record.micro = s.micro[b];
    return absl::OkStatus();
  };
  return s.Push(wire::RecordType::kGradsReady, fill, [&](const wire::Record& record) {
    s.push_mu.AssertHeld();
    ++s.micro[b];
    s.last_use[static_cast<size_t>(s.window[b])] = {
        record.boundary, wire::ConsumedMark(record.generation, record.micro)};
  });
}

absl::Status Session::Ready(int boundary, DeviceStream stream) {
  RETURN_IF_ERROR(impl_->CheckStarted());
  RETURN_IF_ERROR(CheckBoundary(*impl_, boundary));
  return impl_->Later(EventThread::Kind::kReady, boundary, stream);
}

absl::Status Session::Release(int boundary, DeviceStream stream) {
  RETURN_IF_ERROR(impl_->CheckStarted());
  RETURN_IF_ERROR(CheckBoundary(*impl_, boundary));
  return impl_->Later(EventThread::Kind::kRelease, boundary, stream);
}

void Session::EndBackward() { impl_->backwards.fetch_add(1); }

absl::Status Session::Discard() {
  Impl& s = *impl_;
  RETURN_IF_ERROR(s.CheckStarted());
  RETURN_IF_ERROR(s.Settle());
  RETURN_IF_ERROR(s.Push(
      wire::RecordType::kDiscard, [](wire::Record&) { return absl::OkStatus(); },
      [](const wire::Record&) {}));
  s.NextGeneration(s.generation + 1);
  return absl::OkStatus();
}

absl::StatusOr<StepResult> Session::Step(const StepOptions& options) {
  Impl& s = *impl_;
  RETURN_IF_ERROR(s.CheckStarted());
  if (!(options.max_norm >= 0) || std::isinf(options.max_norm)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_norm: expected a finite number of at least 0, got %g", options.max_norm));
  }
  RETURN_IF_ERROR(s.Settle());
  const uint64_t step = s.step + 1;
  uint64_t sent = 0;
  RETURN_IF_ERROR(s.Push(
      wire::RecordType::kStep,
      [&](wire::Record& record) {
        record.step = step;
        record.micro = s.backwards;
        record.flags = options.found_inf ? uint32_t{wire::kFoundInf} : 0u;
        record.max_norm = options.max_norm;
        return absl::OkStatus();
      },
      [&](const wire::Record&) { sent = ++s.steps_sent; }));
  const wire::Verdict& verdict = s.page.header().verdict;
  const absl::Status waited =
      s.Wait([&] { return verdict.answered.load(std::memory_order_acquire) >= sent; });
  if (!waited.ok()) {
    s.phase = Phase::kLost;  // the answer may still come, and nobody would match it
    return waited;
  }
  // A STEP that was refused out of order leaves all as it was. Else ranks that discarded a different number of times meet
  // again in one generation.
  if (verdict.next_generation != s.generation) s.NextGeneration(verdict.next_generation);
  if (verdict.code != 0) return VerdictStatus(verdict);
  if (verdict.step != step) {
    s.phase = Phase::kLost;
    return absl::InternalError(absl::StrFormat(
        "expected the verdict of step %d, got that of step %d", step, verdict.step));
  }
  s.step = step;
  StepResult result;
  result.step = step;
  result.applied = (verdict.flags & wire::kApplied) != 0;
  result.total_norm = verdict.total_norm;
  result.clip_coefficient = verdict.clip_coefficient;
  return result;
}

}  // namespace dmuon::client
