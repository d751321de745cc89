#include "base/checked_math.h"

#include <gtest/gtest.h>

#include <limits>

namespace dmuon {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(CheckedMath, AddGivesTheSumUpToTheLargestValue) {
  EXPECT_EQ(CheckedAdd(kMax - 1, 1), kMax);
  EXPECT_EQ(CheckedAdd(kMax, 1), std::nullopt);
  EXPECT_EQ(CheckedAdd(kMax, kMax), std::nullopt);
}

TEST(CheckedMath, MulGivesTheProductUpToTheLargestValue) {
  EXPECT_EQ(CheckedMul(uint64_t{1} << 32, (uint64_t{1} << 32) - 1), (kMax >> 32) << 32);
  EXPECT_EQ(CheckedMul(uint64_t{1} << 32, uint64_t{1} << 32), std::nullopt);
  EXPECT_EQ(CheckedMul(kMax, 0), 0u);
}

TEST(CheckedMath, AlignUpKeepsMultiplesAndRoundsTheRest) {
  EXPECT_EQ(AlignUp(0, 256), 0u);
  EXPECT_EQ(AlignUp(1, 256), 256u);
  EXPECT_EQ(AlignUp(256, 256), 256u);
  EXPECT_EQ(AlignUp(257, 256), 512u);
}

}  // namespace
}  // namespace dmuon
