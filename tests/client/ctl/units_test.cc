#include "client/ctl/units.h"

#include <gtest/gtest.h>

namespace dmuon::ctl {
namespace {

TEST(Units, BytesAreBinary) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1.00 KiB");
  EXPECT_EQ(HumanBytes(1.5 * 1024 * 1024), "1.50 MiB");
  EXPECT_EQ(HumanBytes(1024.0 * 1024 * 1024 - 1), "1.00 GiB");
}

TEST(Units, FlopsAreDecimal) {
  EXPECT_EQ(HumanFlops(0), "0 FLOP");
  EXPECT_EQ(HumanFlops(4.214e9), "4.21 GFLOP");
  EXPECT_EQ(HumanFlops(99.96e6), "100 MFLOP");
}

TEST(Units, SecondsKeepThreeDigits) {
  EXPECT_EQ(HumanSeconds(0), "0 s");
  EXPECT_EQ(HumanSeconds(12.34e-6), "12.3 us");
  EXPECT_EQ(HumanSeconds(0.00123), "1.23 ms");
  EXPECT_EQ(HumanSeconds(2), "2.00 s");
  EXPECT_EQ(HumanSeconds(1234), "1234 s");
}

}  // namespace
}  // namespace dmuon::ctl
