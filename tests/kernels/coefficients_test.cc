#include "kernels/newton_schulz/coefficients.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/newton_schulz/form.h"
#include "kernels/newton_schulz/restarts.h"

namespace dmuon::kernels {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Coefficients, DefaultSetHasTheFiguresOfThePaperDividedByItsSafety) {
  ASSERT_EQ(PolarExpress().size(), 5);
  EXPECT_DOUBLE_EQ(PolarExpress()[0][0], 8.28721201814563 / 1.05);
  EXPECT_DOUBLE_EQ(PolarExpress()[0][1], -23.595886519098837 / (1.05 * 1.05 * 1.05));
  EXPECT_DOUBLE_EQ(PolarExpress()[0][2], 17.300387312530933 / (1.05 * 1.05 * 1.05 * 1.05 * 1.05));
  EXPECT_DOUBLE_EQ(PolarExpress()[4][2], 0.4188073119525673 / (1.05 * 1.05 * 1.05 * 1.05 * 1.05));
}

TEST(Coefficients, DefaultSetPeaksWhereItIsKnownTo) {
  const double peaks[] = {1.99, 1.97, 1.87, 1.56, 1.124};
  for (int steps = 1; steps <= 5; ++steps) {
    NewtonSchulzOptions options;
    options.steps = steps;
    EXPECT_NEAR(Maximum(Schedule(options)), peaks[steps - 1], 0.006) << steps << " steps";
  }
}

TEST(Coefficients, ShortSetRepeatsItsLastAndLongSetIsCut) {
  NewtonSchulzOptions options;
  options.coefficients = {{1, 2, 3}, {4, 5, 6}};
  options.steps = 4;
  EXPECT_THAT(Schedule(options), ElementsAre(Coefficients{1, 2, 3}, Coefficients{4, 5, 6},
                                             Coefficients{4, 5, 6}, Coefficients{4, 5, 6}));
  options.steps = 1;
  EXPECT_THAT(Schedule(options), ElementsAre(Coefficients{1, 2, 3}));
}

TEST(Validate, AcceptsEveryPublishedSetForAnyNumberOfSteps) {
  for (absl::Span<const Coefficients> set : {PolarExpress(), You(), Jordan()}) {
    for (int steps : {1, 4, 5, 8}) {
      NewtonSchulzOptions options;
      options.coefficients.assign(set.begin(), set.end());
      options.steps = steps;
      EXPECT_TRUE(Validate(options).ok()) << steps;
    }
  }
}

TEST(Validate, NamesTheSingularValueAtWhichACustomSetBreaks) {
  NewtonSchulzOptions options;
  options.coefficients = {{3, -1, 0.5}};  // 2.5 at 1 already, and on from there
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("singular value 0."));
}

TEST(Validate, LooksBeyondOneAsFarAsTheDtypeRounds) {
  // Peaks where x = 1.005 lands beyond the bound, below 1 nowhere.
  NewtonSchulzOptions options;
  options.steps = 1;
  options.coefficients = {{1.49, 0, 0}};
  options.iteration_dtype = Dtype::kF32;
  EXPECT_TRUE(Validate(options).ok());
  options.iteration_dtype = Dtype::kBF16;
  const absl::Status status = Validate(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("singular value 1.0"));
}

TEST(Validate, RefusesCoefficientsThatAreNotFinite) {
  NewtonSchulzOptions options;
  options.coefficients = {{NAN, 0, 0}};
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kInvalidArgument);
}

TEST(Validate, RefusesAStepCountOutOfRange) {
  for (int steps : {-1, 0, 100}) {
    NewtonSchulzOptions options;
    options.steps = steps;
    EXPECT_EQ(Validate(options).code(), absl::StatusCode::kInvalidArgument) << steps;
  }
}

TEST(Restarts, OutOfOrderOrOutOfRangeIsRefused) {
  for (const std::vector<int>& restarts : {std::vector<int>{0}, {5}, {3, 2}, {2, 2}, {-1}}) {
    NewtonSchulzOptions options;
    options.restarts = restarts;
    EXPECT_EQ(Validate(options).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(Restarts, PositionTwoOfEightStepsExplodesInFp16) {
  NewtonSchulzOptions options;
  options.iteration_dtype = Dtype::kF16;
  options.restarts = std::vector<int>{2};
  EXPECT_TRUE(Validate(options).ok()) << Validate(options);
  options.steps = 8;
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("explode"));
}

TEST(Restarts, DerivedOnesHoldTheBoundOfTheirDtype) {
  const struct {
    Dtype dtype;
    double allowance;
  } cases[] = {{Dtype::kF32, 0.005}, {Dtype::kF16, 0.05}, {Dtype::kBF16, 0.2}};
  for (const auto& [dtype, allowance] : cases) {
    for (absl::Span<const Coefficients> set : {PolarExpress(), You(), Jordan()}) {
      for (int steps : {1, 5, 8}) {
        NewtonSchulzOptions options;
        options.coefficients.assign(set.begin(), set.end());
        options.steps = steps;
        const auto schedule = Schedule(options);
        const std::vector<int> restarts = DeriveRestarts(schedule, dtype);
        EXPECT_LE(TrialTopSingularValue(schedule, restarts, dtype), Maximum(schedule) + allowance)
            << Name(dtype) << ", " << steps << " steps, restarts "
            << testing::PrintToString(restarts);
      }
    }
  }
}

TEST(Restarts, DefaultSetNeedsNoneInFp32OneInFp16AndTwoInBf16) {
  EXPECT_THAT(DeriveRestarts(PolarExpress(), Dtype::kF32), ElementsAre());
  EXPECT_EQ(DeriveRestarts(PolarExpress(), Dtype::kF16).size(), 1);
  EXPECT_THAT(DeriveRestarts(PolarExpress(), Dtype::kBF16), ElementsAre(2, 4));
}

TEST(Flops, CountTheFormThatRuns) {
  NewtonSchulzOptions options;
  // Direct: 15 m^2 n + 5 m^3.
  EXPECT_DOUBLE_EQ(Flops(options, 10, 10), 15 * 1000.0 + 5 * 1000.0);
  // Gram: 3 r m^2 n + (4 k - 3 r) m^3; the orientation does not matter.
  options.restarts = std::vector<int>{2};
  EXPECT_DOUBLE_EQ(Flops(options, 10, 40), 6 * 4000.0 + 14 * 1000.0);
  EXPECT_DOUBLE_EQ(Flops(options, 40, 10), 6 * 4000.0 + 14 * 1000.0);
  options.form = NsForm::kDirect;
  EXPECT_DOUBLE_EQ(Flops(options, 40, 10), 15 * 4000.0 + 5 * 1000.0);
}

}  // namespace
}  // namespace dmuon::kernels
