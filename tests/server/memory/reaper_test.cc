#include "server/memory/reaper.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace dmuon::server {
namespace {

TEST(Reaper, WorkAndWhatItHoldsAreGoneWhenItsTicketSaysSo) {
  Reaper reaper(absl::Seconds(60));
  auto held = std::make_shared<int>(1);
  std::weak_ptr<int> watch = held;
  std::atomic<bool> ran{false};
  const Reaper::Ticket ticket = reaper.Post("work", [&ran, held = std::move(held)] {
    ran = true;
    return absl::InternalError("as it went");
  });
  EXPECT_EQ(ticket.Wait(absl::Seconds(60)), absl::InternalError("as it went"));
  EXPECT_TRUE(ran);
  EXPECT_TRUE(watch.expired());
}

TEST(Reaper, WorkThatBlocksHoldsNobodyUp) {
  absl::Notification go, left;
  const absl::Time start = absl::Now();
  {
    Reaper reaper(absl::Milliseconds(50));
    const Reaper::Ticket blocked = reaper.Post("blocked", [&] {
      go.WaitForNotification();
      left.Notify();
      return absl::OkStatus();
    });
    const Reaper::Ticket other = reaper.Post("other", [] { return absl::OkStatus(); });
    EXPECT_TRUE(other.Wait(absl::Seconds(60)).ok());
    EXPECT_EQ(blocked.Wait(absl::Milliseconds(1)).code(), absl::StatusCode::kDeadlineExceeded);
  }  // gives the first up at its deadline
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(50));
  go.Notify();
  left.WaitForNotification();
}

TEST(Reaper, ItsEndWaitsForWorkThatIsInTime) {
  std::atomic<int> done{0};
  {
    Reaper reaper(absl::Seconds(60));
    for (int i = 0; i < 20; ++i) reaper.Post("work", [&] { return ++done, absl::OkStatus(); });
  }
  EXPECT_EQ(done, 20);
}

}  // namespace
}  // namespace dmuon::server
