// What the daemon holds once sessions have ended.
#include <cstdio>

#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

class Memory : public E2eTest {};

// Blocks of some hundred kilobytes to some megabytes are what a heap likes to keep.
TEST_F(Memory, OfManySessionsOneAfterTheOtherIsTheMachinesAgain) {
  if (OnDevice()) GTEST_SKIP() << "of the host's memory";
  constexpr int kRounds = 60, kWarmUp = 20, kRanks = 2;
  constexpr long kGrowthKib = 8192;
  const auto run = [&](int round) {
    for (const absl::Status& status : OnRanks(kRanks, [&](int rank) -> absl::Status {
           client::OpenOptions table =
               SmallTable({.job = "round" + std::to_string(round), .world = kRanks}, rank);
           table.parameters[0].shape = {700, 700};
           table.parameters[2].shape = {500, 700};
           auto trainer = Trainer::Start(endpoint(), table, SmallOptimizer());
           if (!trainer.ok()) return trainer.status();
           if (auto trained = (*trainer)->Train(2); !trained.ok()) return trained;
           return (*trainer)->Close();
         })) {
      EXPECT_TRUE(status.ok()) << status;
    }
    const std::string closed = "session_closed session=round" + std::to_string(round) + "\n";
    EXPECT_TRUE(Eventually([&] { return daemon().Log().find(closed) != std::string::npos; }));
  };
  long early = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (round == kWarmUp) early = daemon().Use().rss_kib;
    run(round);
  }
  const long late = daemon().Use().rss_kib;
  printf("rss %ld KiB after %d sessions, %ld KiB after %d\n", early, kWarmUp, late, kRounds);
  EXPECT_LE(late, early + kGrowthKib);
}

}  // namespace
}  // namespace dmuon::testing
