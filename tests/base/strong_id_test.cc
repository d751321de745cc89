#include "base/strong_id.h"

#include <gtest/gtest.h>

#include <type_traits>

#include "absl/container/flat_hash_set.h"

namespace dmuon {
namespace {

using Apple = StrongId<struct AppleTag>;
using Pear = StrongId<struct PearTag>;

static_assert(!std::is_convertible_v<int, Apple>);
static_assert(!std::is_convertible_v<Pear, Apple>);
static_assert(!std::is_constructible_v<Apple, Pear>);

TEST(StrongId, OrdersAndHashesByValue) {
  EXPECT_LT(Apple(1), Apple(2));
  EXPECT_EQ(Apple(3), Apple(3));
  const absl::flat_hash_set<Apple> set = {Apple(1), Apple(2), Apple(1)};
  EXPECT_EQ(set.size(), 2u);
  EXPECT_TRUE(set.contains(Apple(2)));
}

TEST(StrongId, IsZeroByDefaultAndIndexesAVector) {
  EXPECT_EQ(Apple().value(), 0);
  EXPECT_EQ(Apple(5).index(), size_t{5});
}

}  // namespace
}  // namespace dmuon
