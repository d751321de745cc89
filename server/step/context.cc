#include "server/step/context.h"

#include <algorithm>
#include <cstring>

#include "base/log.h"

namespace dmuon::server {

void Settle(kernels::Backend& backend, kernels::Stream stream) {
  if (!backend.Synchronize(stream).ok()) backend.Synchronize(stream).IgnoreError();
}

void WriteText(absl::string_view text, char* to, size_t size) {
  const size_t n = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

void StepContext::GiveUp(uint64_t next, const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  if (next <= floor_generation.load()) return;
  given_up_ = why;
  floor_generation.store(next);
}

absl::Status StepContext::given_up() const {
  absl::MutexLock lock(&mu_);
  return given_up_;
}

void StepContext::RingWorkers() {
  for (SlotArenas& slot : arenas) slot.page.RingDaemon();
}

void StepContext::Fail(const absl::Status& why) {
  {
    absl::MutexLock lock(&mu_);
    if (!failure_.ok()) return;
    failure_ = why;
  }
  Log(LogLevel::kWarning, "session_failed",
      {{"session", name},
       {"code", absl::StatusCodeToString(why.code())},
       {"reason", why.message()}});
  for (SlotArenas& slot : arenas) {
    wire::PageHeader& header = slot.page.header();
    WriteText(why.message(), header.failure, sizeof(header.failure));
    header.status.store(static_cast<uint32_t>(wire::SessionStatus::kFailed),
                        std::memory_order_release);
    slot.page.RingTrainer();
    slot.page.RingDaemon();
  }
  log->Close();
}

void StepContext::FailSlot(SlotId slot, const absl::Status& why) {
  communicator->SetGone(slot, why);
  Fail(why);
}

absl::Status StepContext::failure() const {
  absl::MutexLock lock(&mu_);
  return failure_;
}

}  // namespace dmuon::server
