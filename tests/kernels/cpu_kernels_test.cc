// The instruction sets of the CPU backend: choosing them, and that they agree.
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/kernel_table.h"

namespace dmuon::kernels {
namespace {

using cpu::KernelTable;
using testing::HasSubstr;

std::vector<const KernelTable*> Tables() {
  std::vector<const KernelTable*> tables;
  for (absl::string_view name : CpuKernelNames()) {
    const auto table = cpu::FindKernels(name);
    if (table.ok()) tables.push_back(*table);
  }
  return tables;
}

std::vector<float> Random(int64_t count, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// The environment variable, for one test.
class Forced {
 public:
  explicit Forced(const char* kernel) { setenv("DMUON_CPU_KERNEL", kernel, 1); }
  ~Forced() { unsetenv("DMUON_CPU_KERNEL"); }
};

TEST(CpuKernel, UnknownNameIsRefusedWithThoseThatThereAre) {
  const auto backend = CreateCpuBackend({.threads = 1, .kernel = "neon"});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(backend.status().message()), HasSubstr("portable"));
}

TEST(CpuKernel, EachNameRunsOrSaysWhatTheProcessorLacks) {
  for (absl::string_view name : CpuKernelNames()) {
    const auto backend = CreateCpuBackend({.threads = 1, .kernel = std::string(name)});
    if (backend.ok()) {
      EXPECT_THAT((*backend)->description(), HasSubstr(std::string(name)));
    } else {
      EXPECT_EQ(backend.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(backend.status().message()), HasSubstr("lacks"));
    }
  }
}

TEST(CpuKernel, EnvironmentForcesOneUnlessTheCallerDoes) {
  Forced portable("portable");
  EXPECT_THAT((*CreateCpuBackend({.threads = 1}))->description(), HasSubstr("portable"));
  Forced unknown("pentium");
  EXPECT_EQ(CreateCpuBackend({.threads = 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(CreateCpuBackend({.threads = 1, .kernel = "portable"}).ok());
}

TEST(CpuKernel, ThreadCountOutOfRangeIsRefused) {
  for (int threads : {-1, 0, 1000000}) {
    EXPECT_EQ(CreateCpuBackend({.threads = threads}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

// Bits of vector operations do not depend on the instruction set: rounding is the same, and so is the order of sums.
TEST(CpuKernel, VectorOperationsHaveTheSameBitsInEveryInstructionSet) {
  const int64_t count = 1237;
  const std::vector<float> a = Random(count, 1), b = Random(count, 2), c = Random(count, 3),
                           d = Random(count, 4);
  std::vector<std::vector<float>> results;
  for (const KernelTable* table : Tables()) {
    std::vector<float> all(a);
    const void* inputs[] = {a.data(), b.data(), c.data()};
    const double sum = table->mean(inputs, 3, Dtype::kF32, 0, count, 3, true, all.data());
    all.push_back(static_cast<float>(sum));
    std::vector<float> next(count);
    table->lookahead(a.data(), b.data(), next.data(), count, 0.95f, 0.5f, true);
    all.insert(all.end(), next.begin(), next.end());
    std::vector<float> m(a), w(b), v(c);
    table->muon_commit(m.data(), c.data(), w.data(), d.data(), count, 0.95f, 0.5f, 0.99f, 0.02f);
    all.insert(all.end(), m.begin(), m.end());
    all.insert(all.end(), w.begin(), w.end());
    for (float& value : v) value = value * value;
    table->adamw(w.data(), m.data(), v.data(), d.data(), count,
                 {.keep = 0.999f,
                  .beta1_weight = 0.1f,
                  .beta2 = 0.999f,
                  .beta2_weight = 0.001f,
                  .correction2_sqrt = 0.3f,
                  .eps = 1e-8f,
                  .minus_step_size = -0.01f});
    for (const std::vector<float>* part : {&w, &m, &v})
      all.insert(all.end(), part->begin(), part->end());
    double square_sum;
    float magnitude;
    table->norm(a.data(), count, &square_sum, &magnitude);
    all.push_back(static_cast<float>(square_sum));
    all.push_back(magnitude);
    results.push_back(std::move(all));
  }
  for (size_t i = 1; i < results.size(); ++i) {
    ASSERT_EQ(results[i].size(), results[0].size());
    EXPECT_EQ(std::memcmp(results[i].data(), results[0].data(), results[0].size() * sizeof(float)),
              0)
        << Tables()[i]->name << " differs from " << Tables()[0]->name;
  }
}

TEST(CpuKernel, TilesAreMovedAndRoundedAlike) {
  constexpr int kFloats = cpu::kTile * cpu::kTile;
  alignas(64) float tile[kFloats], moved[kFloats], back[kFloats];
  alignas(64) uint16_t block[kFloats];
  const std::vector<float> values = Random(kFloats, 5);
  std::memcpy(tile, values.data(), sizeof(tile));
  for (const KernelTable* table : Tables()) {
    table->transpose(tile, moved);
    for (int i = 0; i < cpu::kTile; ++i) {
      for (int j = 0; j < cpu::kTile; ++j)
        ASSERT_EQ(moved[j * cpu::kTile + i], tile[i * cpu::kTile + j]) << table->name;
    }
    // Through bf16 and back: within half a unit in the last of 8 bits.
    table->pack_bf16(tile, block);
    alignas(64) float zero[kFloats] = {};
    table->combine_bf16(zero, 0, block, 1, back);
    for (int i = 0; i < kFloats; ++i)
      ASSERT_NEAR(back[i], tile[i], std::fabs(tile[i]) * 0x1p-8) << table->name;
  }
}

TEST(CpuKernel, ProductsOfTilesMatchFloat64) {
  constexpr int kRows = 75, kFloats = cpu::kTile * cpu::kTile;
  const std::vector<float> a = Random(kRows * cpu::kTile, 6), b = Random(kRows * cpu::kTile, 7);
  alignas(64) float left[kRows * cpu::kTile], right[kRows * cpu::kTile], sum[kFloats];
  std::memcpy(left, a.data(), sizeof(left));
  std::memcpy(right, b.data(), sizeof(right));
  for (const KernelTable* table : Tables()) {
    for (bool add : {false, true}) {
      std::fill(sum, sum + kFloats, 10.f);
      table->multiply_f32({.a = left, .b = right, .packed_rows = kRows, .acc = sum, .add = add});
      for (int i = 0; i < cpu::kTile; ++i) {
        for (int j = 0; j < cpu::kTile; ++j) {
          double exact = add ? 10 : 0;
          for (int k = 0; k < kRows; ++k)
            exact += static_cast<double>(a[k * cpu::kTile + i]) * b[k * cpu::kTile + j];
          ASSERT_NEAR(sum[i * cpu::kTile + j], exact, 2e-5) << table->name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::kernels
