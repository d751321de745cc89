#include "client/page_wait.h"

#include <sched.h>

#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dmuon::client {
namespace {

// A daemon's answer that comes at once costs no system call, and a late one costs no more than
// this.
constexpr std::chrono::microseconds kSpin{5};

bool MoreThanOneCore() {
  static const bool more = [] {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof(cores), &cores) == 0 && CPU_COUNT(&cores) > 1;
  }();
  return more;
}

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool SpinUntil(absl::FunctionRef<bool()> done) {
  if (!MoreThanOneCore()) return false;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      Relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

absl::Status PageStatus(const wire::ControlPage& page) {
  const wire::PageHeader& header = page.header();
  const uint32_t status = header.status.load(std::memory_order_acquire);
  if (status == static_cast<uint32_t>(wire::SessionStatus::kOpen)) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("the session has failed: ",
                   absl::string_view(header.failure, strnlen(header.failure, wire::kReasonBytes))));
}

absl::Status WaitOnPage(const wire::ControlPage& page, const Connection::Impl& connection,
                        absl::FunctionRef<bool()> done, absl::Duration tick) {
  if (done() || SpinUntil(done)) return absl::OkStatus();
  absl::Time next_look = absl::Now() + kLookEvery;
  for (;;) {
    const uint32_t seen = page.TrainerDoorbell();
    if (done()) return absl::OkStatus();
    absl::Status status = PageStatus(page);
    if (status.ok() && absl::Now() >= next_look) {
      status = connection.Look();
      next_look = absl::Now() + kLookEvery;
    }
    // What was waited for may have come just before the end.
    if (!status.ok()) return done() ? absl::OkStatus() : status;
    page.TrainerWait(seen, tick);
  }
}

}  // namespace dmuon::client
