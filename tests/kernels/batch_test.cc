// Blocks of one shape, run together: each as if it were alone, on every kernel and number of threads.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/runner.h"
#include "tests/kernels/spectra.h"

namespace dmuon::kernels {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, EachKernel, ForcedKernels(), KernelOf);

// Blocks of one shape with gaps between them, and one that is zero.
struct Blocks {
  Blocks(int64_t rows, int64_t cols, int64_t count) : rows(rows), cols(cols) {
    const int64_t pitch = rows * cols + 5;
    values = reference::Gaussian(count, pitch, kSeed).values;
    for (int64_t i = 0; i < count; ++i) offsets.push_back(i * pitch);
    if (count > 3) std::fill_n(values.begin() + offsets[2], rows * cols, 0.0f);
  }
  const int64_t rows, cols;
  std::vector<float> values;
  std::vector<int64_t> offsets;
};

TEST_P(EachKernel, BlocksOfABatchHaveTheBitsOfEachAloneForAnyNumberOfThreads) {
  for (const Mode& mode : kModes) {
    for (const auto& [rows, cols, count] : {std::array<int64_t, 3>{16, 16, 9},
                                            {64, 64, 16},
                                            {7, 200, 5},
                                            {200, 7, 3},
                                            {96, 160, 2},
                                            {128, 512, 5},
                                            {640, 640, 3}}) {
      const Blocks blocks(rows, cols, count);
      std::vector<float> alone = blocks.values;
      for (const int64_t offset : blocks.offsets) {
        Matrix<float> in(rows, cols);
        std::copy_n(blocks.values.begin() + offset, rows * cols, in.values.begin());
        const Matrix<float> out = runner_.Run(OptionsFor(mode), in);
        std::copy(out.values.begin(), out.values.end(), alone.begin() + offset);
      }
      for (int threads : {1, 2, 3, 8}) {
        Runner runner(GetParam(), threads);
        auto plan = PlanNewtonSchulz(runner.backend(), OptionsFor(mode), rows, cols);
        ASSERT_TRUE(plan.ok()) << plan.status();
        const size_t bytes =
            PlanMemory(runner.backend(), OptionsFor(mode), rows, cols, count)->workspace_bytes;
        EXPECT_EQ(bytes, (*plan)->batch_workspace_bytes(count));
        void* workspace = *runner.backend().Allocate(bytes);
        std::vector<float> batch = blocks.values;
        (*plan)->RunBatch({}, {.in = batch.data(),
                               .out = batch.data(),
                               .offsets = blocks.offsets,
                               .workspace = workspace});
        EXPECT_EQ(std::memcmp(batch.data(), alone.data(), batch.size() * sizeof(float)), 0)
            << count << " of " << rows << " x " << cols << ", " << threads << " threads";
        runner.backend().Free(workspace);
      }
    }
  }
}

}  // namespace
}  // namespace dmuon::kernels
