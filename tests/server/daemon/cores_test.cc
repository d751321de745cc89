#include "server/daemon/cores.h"

#include <sched.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

TEST(Cores, AQuotaCountsRoundedUpAndNeverMoreThanTheMask) {
  EXPECT_EQ(CoresWithin(64, "200000 100000\n"), 2);
  EXPECT_EQ(CoresWithin(64, "250000 100000"), 3);
  EXPECT_EQ(CoresWithin(64, "10000 100000"), 1);
  EXPECT_EQ(CoresWithin(2, "800000 100000"), 2);
}

TEST(Cores, WithoutAQuotaTheMaskCounts) {
  for (const char* text : {"max 100000\n", "", "max", "100000", "-1 100000", "100000 0", "1 2 3",
                           "99999999999999999999 1"}) {
    EXPECT_EQ(CoresWithin(8, text), 8) << "'" << text << "'";
  }
}

TEST(Cores, TheMaskIsWhatThisThreadMayRunOn) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  int core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(UsableCores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(Cores, ThreadsAreWhatWasWishedButNeverMoreThanTheCores) {
  EXPECT_EQ(ThreadsFor(0, 4).count, 4);
  EXPECT_EQ(ThreadsFor(3, 4).count, 3);
  EXPECT_EQ(ThreadsFor(3, 4).warning, "");
  EXPECT_EQ(ThreadsFor(9, 4).count, 4);
  EXPECT_THAT(ThreadsFor(9, 4).warning, testing::HasSubstr("9 asked for, 4 cores"));
}

}  // namespace
}  // namespace dmuon::server
