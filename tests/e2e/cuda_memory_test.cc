// Sessions that do not fit on a GPU. On the stand-ins for CUDA.
#include <string>

#include "tests/e2e/e2e_test_base.h"
#include "tests/support/environment.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Before the daemon starts.
struct SmallDevices {
  const ScopedEnvironment environment{Environment{{"DMUON_FAKE_CUDA_MEMORY", "300000000"}}};
};

class CudaTooBig : private SmallDevices, public E2eTest {};

// The bystander on the same GPU goes on, as after every test.
TEST_F(CudaTooBig, ASessionThatDoesNotFitIsRefusedWithTheNumbersAndASmallerOneIsNot) {
  client::OpenOptions table = SmallTable({.job = "big"}, 0);
  table.parameters[0].shape = {4096, 4096};
  const absl::Status refused = Trainer::Start(endpoint(), table, SmallOptimizer()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("needs "), HasSubstr(" bytes"),
                                                    HasSubstr("GPU-"), HasSubstr(" available")));
  auto smaller = Trainer::Start(endpoint(), {.job = "small"}, 0);
  ASSERT_TRUE(smaller.ok()) << smaller.status();
  EXPECT_TRUE((*smaller)->Train(2).ok());
  EXPECT_TRUE((*smaller)->Close().ok());
}

}  // namespace
}  // namespace dmuon::testing
