// client/examples/train_mlp: a C++ author's program, without Python.
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

class Example : public E2eTest, public ::testing::WithParamInterface<int> {};

TEST_P(Example, TrainsAndItsLossFalls) {
  ChildProcess trainer(
      {Program("train_mlp"), "--endpoint", endpoint(), "--world", std::to_string(GetParam())});
  const std::string output = trainer.ReadAll();
  EXPECT_EQ(trainer.Wait(), 0) << output;
  std::vector<double> losses;
  for (absl::string_view line : absl::StrSplit(output, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    double loss = 0;
    ASSERT_TRUE(words.size() == 4 && absl::SimpleAtod(words[3], &loss)) << line;
    losses.push_back(loss);
  }
  ASSERT_EQ(losses.size(), 11u) << output;
  EXPECT_LT(losses.back(), losses.front() / 5) << output;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Example, ::testing::Values(1, 2, 4),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace dmuon::testing
