// The contract of kernels/ops/backend.h, run on every backend of the list that this machine has.
#include "kernels/ops/backend.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/kernels/each_backend.h"

namespace dmuon::kernels {
namespace {

// Around vector widths, chunks (32768) and several of them.
constexpr int64_t kCounts[] = {0, 1, 15, 16, 17, 1000, 32768, 100003};

// What torch and IEEE 754 call nearest even, by arithmetic instead of bits. Values within bf16's normal range.
float NearestBf16(float x) {
  int exponent;
  std::frexp(x, &exponent);
  const double quantum = std::ldexp(1.0, exponent - 8);
  return static_cast<float>(std::nearbyint(x / quantum) * quantum);
}

uint16_t Bf16Bits(float exact) {
  uint32_t bits;
  std::memcpy(&bits, &exact, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

INSTANTIATE_TEST_SUITE_P(All, EachBackend, kEachName, [](const auto& info) { return info.param; });

TEST_P(EachBackend, DescriptionStartsWithItsName) {
  EXPECT_EQ(backend_->name(), GetParam());
  EXPECT_THAT(backend_->description(), testing::StartsWith(GetParam() + ": "));
}

TEST_P(EachBackend, MemoryIsAlignedAndZeroed) {
  for (size_t bytes : {1, 255, 4096, 5 << 20}) {
    char* memory = static_cast<char*>(Bytes(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0);
    for (char c : Host(memory, static_cast<int64_t>(bytes))) ASSERT_EQ(c, 0);
  }
}

TEST_P(EachBackend, CopyMovesBytesWithinTheDevice) {
  std::vector<float> values = Normal(1000, kSeed);
  float* to = static_cast<float*>(Bytes(1001 * sizeof(float)));
  backend_->Copy(stream_, to, Device(values), 1000 * sizeof(float));
  values.push_back(0);  // one more is not touched
  EXPECT_EQ(Host(to, 1001), values);
}

TEST_P(EachBackend, MoreMemoryThanThereIsAnswersResourceExhausted) {
  EXPECT_EQ(backend_->Allocate(size_t{1} << 60).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(backend_->Allocate(std::numeric_limits<size_t>::max()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_P(EachBackend, MeanIsTheSumInRankOrderOverTheDivisor) {
  for (int64_t count : kCounts) {
    for (int ranks : {1, 2, 4}) {
      std::vector<std::vector<float>> inputs;
      std::vector<const void*> devices;
      for (int r = 0; r < ranks; ++r) {
        inputs.push_back(Normal(count, kSeed + r));
        devices.push_back(Device(inputs.back()));
      }
      const std::vector<float> before = Normal(count, kSeed + 100);
      for (bool accumulate : {false, true}) {
        MeanArgs args;
        args.inputs = devices;
        args.count = count;
        args.divisor = static_cast<float>(ranks + 1);
        args.accumulate = accumulate;
        args.mean = Device(before);
        args.square_sum = static_cast<double*>(Bytes(sizeof(double)));
        backend_->MeanOverRanks(stream_, args);
        double square_sum = 0;
        const std::vector<float> mean = Host(args.mean, count);
        for (int64_t i = 0; i < count; ++i) {
          float sum = inputs[0][i];
          for (int r = 1; r < ranks; ++r) sum += inputs[r][i];
          const float expected = (accumulate ? before[i] : 0) + sum / args.divisor;
          ASSERT_FLOAT_EQ(mean[i], expected) << i << " of " << count;
          square_sum += static_cast<double>(mean[i]) * mean[i];
        }
        EXPECT_NEAR(Host(args.square_sum, 1)[0], square_sum, 1e-12 * square_sum);
      }
    }
  }
}

TEST_P(EachBackend, MeanReadsBf16AndF16) {
  const int64_t count = 1003;
  const std::vector<float> exact = [&] {
    std::vector<float> values = Normal(count, kSeed);
    for (float& value : values) value = NearestBf16(value);
    return values;
  }();
  for (Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    void* narrow = Bytes(count * sizeof(uint16_t));
    backend_->Publish(stream_, Device(exact), dtype, narrow, count);
    const void* inputs[] = {narrow, narrow};
    MeanArgs args;
    args.inputs = inputs;
    args.dtype = dtype;
    args.count = count;
    args.divisor = 2;
    args.mean = static_cast<float*>(Bytes(count * sizeof(float)));
    backend_->MeanOverRanks(stream_, args);
    const std::vector<float> mean = Host(args.mean, count);
    for (int64_t i = 0; i < count; ++i) {
      // bf16 values of this size are exact in fp16 but for those near zero.
      ASSERT_NEAR(mean[i], exact[i], dtype == Dtype::kBF16 ? 0 : 0x1p-24) << Name(dtype);
    }
  }
}

TEST_P(EachBackend, SquareSumOf1e30IsLargeAndNotInfinite) {
  const std::vector<float> large(1000, 1e30f);
  const void* inputs[] = {Device(large)};
  MeanArgs args;
  args.inputs = inputs;
  args.count = 1000;
  args.mean = static_cast<float*>(Bytes(1000 * sizeof(float)));
  args.square_sum = static_cast<double*>(Bytes(sizeof(double)));
  backend_->MeanOverRanks(stream_, args);
  EXPECT_NEAR(Host(args.square_sum, 1)[0] / 1e63, 1, 1e-6);
}

TEST_P(EachBackend, SquareSumTellsOneNanAmongManyValues) {
  std::vector<float> values = Normal(100003, kSeed);
  values[77777] = NAN;
  const void* inputs[] = {Device(values)};
  MeanArgs args;
  args.inputs = inputs;
  args.count = static_cast<int64_t>(values.size());
  args.mean = static_cast<float*>(Bytes(values.size() * sizeof(float)));
  args.square_sum = static_cast<double*>(Bytes(sizeof(double)));
  backend_->MeanOverRanks(stream_, args);
  EXPECT_TRUE(std::isnan(Host(args.square_sum, 1)[0]));
}

TEST_P(EachBackend, RepeatsOfTheMeanGiveTheSameBits) {
  const std::vector<float> a = Normal(300007, kSeed), b = Normal(300007, kSeed + 1);
  const void* inputs[] = {Device(a), Device(b)};
  std::vector<float> first;
  double first_sum = 0;
  for (int repeat = 0; repeat < 200; ++repeat) {
    MeanArgs args;
    args.inputs = inputs;
    args.count = static_cast<int64_t>(a.size());
    args.divisor = 3;
    if (repeat == 0) {
      args.mean = static_cast<float*>(Bytes(a.size() * sizeof(float)));
      args.square_sum = static_cast<double*>(Bytes(sizeof(double)));
    } else {
      args.mean = static_cast<float*>(owned_[owned_.size() - 2]);
      args.square_sum = static_cast<double*>(owned_.back());
    }
    backend_->MeanOverRanks(stream_, args);
    const std::vector<float> mean = Host(args.mean, args.count);
    const double sum = Host(args.square_sum, 1)[0];
    if (repeat == 0) first = mean, first_sum = sum;
    ASSERT_EQ(std::memcmp(mean.data(), first.data(), mean.size() * sizeof(float)), 0) << repeat;
    ASSERT_EQ(sum, first_sum) << repeat;
  }
}

TEST_P(EachBackend, LookaheadIsTheFormulaAndKeepsItsInputs) {
  for (int64_t count : kCounts) {
    for (bool nesterov : {false, true}) {
      const std::vector<float> m = Normal(count, kSeed), g = Normal(count, kSeed + 1);
      LookaheadArgs args;
      args.momentum = Device(m);
      args.gradient = Device(g);
      args.update = static_cast<float*>(Bytes(count * sizeof(float)));
      args.count = count;
      args.mu = 0.95f;
      args.clip = 0.7f;
      args.nesterov = nesterov;
      backend_->Lookahead(stream_, args);
      const std::vector<float> update = Host(args.update, count);
      const double mu = args.mu, c = args.clip;
      for (int64_t i = 0; i < count; ++i) {
        const double moved = mu * m[i] + c * g[i];
        const double expected = nesterov ? c * g[i] + mu * moved : moved;
        ASSERT_NEAR(update[i], expected, 3e-7 * (std::fabs(m[i]) + std::fabs(g[i])));
      }
      EXPECT_EQ(Host(args.momentum, count), m);
      EXPECT_EQ(Host(args.gradient, count), g);
    }
  }
}

TEST_P(EachBackend, CommitMovesMomentumAndWeightAndPublishes) {
  for (int64_t count : kCounts) {
    const std::vector<float> m = Normal(count, kSeed), g = Normal(count, kSeed + 1),
                             w = Normal(count, kSeed + 2), o = Normal(count, kSeed + 3);
    MuonCommitArgs args;
    args.momentum = Device(m);
    args.gradient = Device(g);
    args.weight = Device(w);
    args.orthogonal = Device(o);
    args.count = count;
    args.mu = 0.95f;
    args.clip = 0.5f;
    args.decay = 0.002f;
    args.scale = 0.02f;
    args.published = Bytes(count * sizeof(uint16_t));
    args.published_dtype = Dtype::kBF16;
    backend_->MuonCommit(stream_, args);
    const std::vector<float> momentum = Host(args.momentum, count),
                             weight = Host(args.weight, count);
    const auto published = Host(static_cast<uint16_t*>(args.published), count);
    for (int64_t i = 0; i < count; ++i) {
      const double expected_m =
          static_cast<double>(args.mu) * m[i] + static_cast<double>(args.clip) * g[i];
      const double expected_w =
          w[i] * (1 - static_cast<double>(args.decay)) - static_cast<double>(args.scale) * o[i];
      ASSERT_NEAR(momentum[i], expected_m, 2e-7 * (std::fabs(m[i]) + std::fabs(g[i])));
      ASSERT_NEAR(weight[i], expected_w, 2e-7 * (std::fabs(w[i]) + std::fabs(o[i])));
      ASSERT_EQ(published[i], Bf16Bits(NearestBf16(weight[i])));
    }
    EXPECT_EQ(Host(args.gradient, count), g);
    EXPECT_EQ(Host(args.orthogonal, count), o);
  }
}

TEST_P(EachBackend, CommitMeasuresWithoutChangingABit) {
  for (int64_t count : kCounts) {
    const std::vector<float> m = Normal(count, kSeed), g = Normal(count, kSeed + 1),
                             w = Normal(count, kSeed + 2), o = Normal(count, kSeed + 3);
    MuonCommitArgs plain = {.gradient = Device(g),
                            .orthogonal = Device(o),
                            .count = count,
                            .mu = 0.95f,
                            .clip = 0.5f,
                            .decay = 0.002f,
                            .scale = 0.02f};
    MuonCommitArgs measured = plain;
    plain.momentum = Device(m), measured.momentum = Device(m);
    plain.weight = Device(w), measured.weight = Device(w);
    measured.square_sums = Device(std::vector<double>{-1});
    backend_->MuonCommit(stream_, plain);
    backend_->MuonCommit(stream_, measured);
    EXPECT_EQ(Host(plain.momentum, count), Host(measured.momentum, count));
    EXPECT_EQ(Host(plain.weight, count), Host(measured.weight, count));
    double expected = 0;
    for (float x : o) expected += double{x} * x;
    EXPECT_NEAR(Host(measured.square_sums, 1)[0], expected, 1e-5 * expected) << count;
  }
}

// ||O O^T - I||_F^2 / m itself up to eight rows: then all of them are in the sample.
TEST_P(EachBackend, OrthogonalityOfAFewRowsIsTheErrorItself) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 300}, {300, 1}, {8, 8}, {7, 2000}, {2000, 7}}) {
    const std::vector<float> o = Normal(rows * cols, kSeed, 0.3f);
    const int64_t m = std::min(rows, cols), n = std::max(rows, cols);
    const auto at = [&, rows = rows, cols = cols](int64_t i, int64_t k) {
      return double{o[rows <= cols ? i * cols + k : k * cols + i]};
    };
    double expected = 0;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < m; ++j) {
        double product = i == j ? -1 : 0;
        for (int64_t k = 0; k < n; ++k) product += at(i, k) * at(j, k);
        expected += product * product / static_cast<double>(m);
      }
    }
    auto* error = Device(std::vector<double>{-1});
    backend_->Orthogonality(
        stream_, {.orthogonal = Device(o), .rows = rows, .cols = cols, .square_errors = error});
    EXPECT_NEAR(Host(error, 1)[0], expected, 1e-5 * expected) << rows << " x " << cols;
  }
}

// A step reads what it measured without waiting for the device a second time.
TEST_P(EachBackend, ACopyToTheHostIsThereOnceAMarkBehindItIsReached) {
  float* memory = Device(std::vector<float>(3, 0));
  // More copies and marks than there are events.
  std::vector<std::vector<float>> values, got;
  std::vector<uint64_t> marks;
  for (int i = 0; i < 200; ++i) {
    values.push_back({1.0f * static_cast<float>(i), 2, 3});
    got.push_back({-1, -1, -1});
  }
  for (int i = 0; i < 200; ++i) {
    backend_->CopyFromHost(stream_, memory, values[i].data(), 3 * sizeof(float));
    backend_->CopyToHost(stream_, got[i].data(), memory, 3 * sizeof(float));
    marks.push_back(backend_->Mark(stream_));
  }
  for (int i = 0; i < 200; ++i) {
    const absl::Time deadline = absl::Now() + absl::Minutes(1);
    absl::StatusOr<bool> reached = false;
    while (reached.ok() && !*reached && absl::Now() < deadline)
      reached = backend_->Reached(stream_, marks[i]);
    ASSERT_TRUE(reached.ok() && *reached) << i;
    ASSERT_EQ(got[i], values[i]) << i;
  }
}

TEST_P(EachBackend, AdamwFollowsTheFloat64FormulaOverManySteps) {
  const int64_t count = 5003;
  std::vector<float> w = Normal(count, kSeed);
  std::vector<double> exact_w(w.begin(), w.end()), exact_m(count), exact_v(count);
  AdamwArgs args;
  args.weight = Device(w);
  args.exp_avg = Device(std::vector<float>(count));
  args.exp_avg_sq = Device(std::vector<float>(count));
  args.count = count;
  args.lr = 1e-3;
  args.beta1 = 0.9;
  args.beta2 = 0.999;
  args.eps = 1e-8;
  args.weight_decay = 0.01;
  double worst = 0;
  for (int step = 1; step <= 100; ++step) {
    const std::vector<float> g = Normal(count, kSeed + step, 0.1f);
    args.gradient = Device(g);
    args.step = step;
    backend_->Adamw(stream_, args);
    for (int64_t i = 0; i < count; ++i) {
      exact_w[i] *= static_cast<float>(1 - args.lr * args.weight_decay);  // as torch rounds it
      exact_m[i] += (1 - args.beta1) * (g[i] - exact_m[i]);
      exact_v[i] = args.beta2 * exact_v[i] + (1 - args.beta2) * g[i] * g[i];
      const double denominator =
          std::sqrt(exact_v[i] / (1 - std::pow(args.beta2, step))) + args.eps;
      exact_w[i] -= args.lr / (1 - std::pow(args.beta1, step)) * exact_m[i] / denominator;
    }
  }
  const std::vector<float> weight = Host(args.weight, count);
  for (int64_t i = 0; i < count; ++i) worst = std::max(worst, std::fabs(weight[i] - exact_w[i]));
  // Two roundings a step, each half a unit in the last place of a weight below 4; decay rounds the same way each time.
  const double bound = 100 * 0x1p-22;
  EXPECT_LE(worst, bound);
  std::printf("  adamw, 100 steps: worst weight off by %.1e  bound %.1e\n", worst, bound);
}

TEST_P(EachBackend, AdamwOfAPartHasTheBitsOfTheWhole) {
  const int64_t count = 40007, cut = 12345;
  const std::vector<float> w = Normal(count, kSeed), g = Normal(count, kSeed + 1);
  AdamwArgs args;
  args.lr = 1e-3, args.beta1 = 0.9, args.beta2 = 0.999, args.eps = 1e-8, args.weight_decay = 0.1;
  args.gradient = Device(g);
  args.weight = Device(w);
  args.exp_avg = Device(std::vector<float>(count));
  args.exp_avg_sq = Device(std::vector<float>(count));
  args.count = count;
  backend_->Adamw(stream_, args);
  AdamwArgs part = args;
  part.weight = Device(w);
  part.exp_avg = Device(std::vector<float>(count));
  part.exp_avg_sq = Device(std::vector<float>(count));
  float* const parted = part.weight;
  for (const auto& [from, to] : {std::pair<int64_t, int64_t>{0, cut}, {cut, count}}) {
    AdamwArgs range = part;
    range.weight += from, range.exp_avg += from, range.exp_avg_sq += from, range.gradient += from;
    range.count = to - from;
    backend_->Adamw(stream_, range);
  }
  EXPECT_EQ(Host(parted, count), Host(args.weight, count));
}

TEST_P(EachBackend, PublishRoundsToNearestEven) {
  const struct {
    float from;
    uint16_t bf16, f16;
  } cases[] = {
      {1.0f, 0x3f80, 0x3c00},
      {-0.0f, 0x8000, 0x8000},
      {1.00390625f, 0x3f80, 0x3c04},     // 1 + 2^-8: a tie in bf16, to even
      {1.01171875f, 0x3f82, 0x3c0c},     // 1 + 3 2^-8: a tie, up to even
      {1.00048828125f, 0x3f80, 0x3c00},  // 1 + 2^-11: a tie in fp16, to even
      {65520.f, 0x4780, 0x7c00},         // a tie at the end of fp16: to infinity
      {65519.f, 0x4780, 0x7bff},
      {5.9604645e-8f, 0x3380, 0x0001},  // 2^-24, the least fp16
      {2.9802322e-8f, 0x3300, 0x0000},  // half of it: a tie, to zero
      {3.4e38f, 0x7f80, 0x7c00},
      {std::numeric_limits<float>::infinity(), 0x7f80, 0x7c00},
      {-std::numeric_limits<float>::infinity(), 0xff80, 0xfc00},
  };
  std::vector<float> from;
  for (const auto& c : cases) from.push_back(c.from);
  const int64_t count = static_cast<int64_t>(from.size());
  for (Dtype dtype : {Dtype::kBF16, Dtype::kF16}) {
    auto* to = static_cast<uint16_t*>(Bytes(count * sizeof(uint16_t)));
    backend_->Publish(stream_, Device(from), dtype, to, count);
    const std::vector<uint16_t> bits = Host(to, count);
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(bits[i], dtype == Dtype::kBF16 ? cases[i].bf16 : cases[i].f16)
          << from[i] << " in " << Name(dtype);
    }
  }
}

TEST_P(EachBackend, PublishKeepsNan) {
  uint32_t least = 0x7f800001,
           all = 0xffffffff;  // rounding these as numbers would make infinity, or zero
  std::vector<float> from(2);
  std::memcpy(&from[0], &least, 4);
  std::memcpy(&from[1], &all, 4);
  auto* to = static_cast<uint16_t*>(Bytes(4));
  backend_->Publish(stream_, Device(from), Dtype::kBF16, to, 2);
  for (uint16_t bits : Host(to, 2)) EXPECT_GT(bits & 0x7fff, 0x7f80);
  backend_->Publish(stream_, Device(from), Dtype::kF16, to, 2);
  for (uint16_t bits : Host(to, 2)) EXPECT_GT(bits & 0x7fff, 0x7c00);
}

TEST_P(EachBackend, PublishInFp32IsACopy) {
  const std::vector<float> from = Normal(70001, kSeed);
  auto* to = static_cast<float*>(Bytes(from.size() * sizeof(float)));
  backend_->Publish(stream_, Device(from), Dtype::kF32, to, static_cast<int64_t>(from.size()));
  EXPECT_EQ(Host(to, static_cast<int64_t>(from.size())), from);
}

TEST(CreateBackend, AutoFindsOneAndSaysWhichAndWhy) {
  auto backend = CreateBackend("auto", 1);
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_FALSE((*backend)->description().empty());
}

TEST(CreateBackend, UnknownNameIsRefusedWithThoseThatThereAre) {
  const auto backend = CreateBackend("tpu", 1);
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(backend.status().message()), testing::HasSubstr("cpu"));
}

}  // namespace
}  // namespace dmuon::kernels
