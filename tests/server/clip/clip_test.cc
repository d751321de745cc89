#include "server/clip/clip.h"

#include "gtest/gtest.h"

namespace dmuon::server {
namespace {

TEST(Clip, IsPyTorchsCoefficient) {
  EXPECT_DOUBLE_EQ(ClipCoefficient(10, 0), 1);
  EXPECT_DOUBLE_EQ(ClipCoefficient(0.5, 1), 1);
  EXPECT_DOUBLE_EQ(ClipCoefficient(10, 1), 1 / (10 + 1e-6));
  EXPECT_DOUBLE_EQ(ClipCoefficient(0, 1), 1);
}

}  // namespace
}  // namespace dmuon::server
