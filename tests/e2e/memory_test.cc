// What the daemon holds once sessions have ended.
#include <cstdio>

#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

class Memory : public E2eTest {};

// Blocks of some hundred kilobytes to some megabytes are what a heap likes to keep.
TEST_F(Memory, OfFortySessionsOneAfterTheOtherIsTheMachinesAgain) {
  constexpr int kRounds = 40, kRanks = 2;
  constexpr long kKeptKib = 16384;  // threads and pools that the daemon makes once
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
    EXPECT_TRUE(Eventually([&] { return Sessions().size() == 1; }));
  };
  for (int round = 0; round < kRounds; ++round) run(round);
  long late = 0;
  EXPECT_TRUE(Eventually(
      [&] {
        late = daemon().Use().rss_kib;
        return late <= before().rss_kib + kKeptKib;
      },
      absl::Seconds(10)));
  printf("rss %ld KiB before, %ld KiB after %d sessions\n", before().rss_kib, late, kRounds);
}

}  // namespace
}  // namespace dmuon::testing
