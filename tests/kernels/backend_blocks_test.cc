// What operations on several blocks give: the bits of each block alone, and nothing between them.
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/newton_schulz/newton_schulz.h"
#include "tests/kernels/each_backend.h"

namespace dmuon::kernels {
namespace {

using EachBackendBlocks = EachBackend;
INSTANTIATE_TEST_SUITE_P(All, EachBackendBlocks, kEachName,
                         [](const auto& info) { return info.param; });

// `blocks` of `count` elements with gaps of 1, 2, ... elements between them.
std::vector<int64_t> Offsets(int64_t blocks, int64_t count) {
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < blocks; ++i) offsets.push_back(i * count + i * (i + 1) / 2);
  return offsets;
}

struct Case {
  int64_t blocks, count;
};
// One chunk and less, several; more blocks than one launch takes, and one that has more than a launch has partial sums for.
constexpr Case kCases[] = {{1, 5000}, {3, 1}, {5, 4097}, {3, 70000}, {131, 40}, {0, 16}};

TEST_P(EachBackendBlocks, LookaheadOfSeveralIsThatOfEachWithItsNorm) {
  for (const auto& [blocks, count] : kCases) {
    const std::vector<int64_t> offsets = Offsets(blocks, count);
    const int64_t all = blocks * count + blocks * (blocks + 1) / 2 + 1;
    LookaheadArgs args = {.momentum = Device(Normal(all, kSeed)),
                          .gradient = Device(Normal(all, kSeed + 1)),
                          .offsets = offsets,
                          .count = count,
                          .mu = 0.95f,
                          .clip = 0.5f};
    args.update = Device(std::vector<float>(all, -7));
    args.norms = Device(std::vector<BlockNorm>(blocks + 1, {-1, -1}));
    args.square_sums = Device(std::vector<double>(blocks + 1, -1));
    backend_->Lookahead(stream_, args);
    std::vector<float> alone(all, -7);
    const std::vector<BlockNorm> norms = Host(args.norms, blocks + 1);
    for (int64_t i = 0; i < blocks; ++i) {
      LookaheadArgs one = args;
      one.momentum += offsets[i], one.gradient += offsets[i], one.count = count;
      one.offsets = kOneBlock;
      one.update = Device(std::vector<float>(count));
      one.norms = nullptr, one.square_sums = nullptr;
      backend_->Lookahead(stream_, one);
      const std::vector<float> u = Host(one.update, count);
      std::copy(u.begin(), u.end(), alone.begin() + offsets[i]);
      double square_sum = 0, largest = 0;
      for (float x : u) {
        square_sum += double{x} * x;
        largest = std::max(largest, std::fabs(double{x}));
      }
      EXPECT_NEAR(norms[i].square_sum, square_sum, 1e-6 * square_sum) << count << ", block " << i;
      EXPECT_EQ(norms[i].largest, largest) << count << ", block " << i;
      EXPECT_EQ(Host(args.square_sums, blocks)[i], norms[i].square_sum);
    }
    EXPECT_EQ(Host(args.update, all), alone) << blocks << " blocks of " << count;
    EXPECT_EQ(norms[blocks].square_sum, -1) << "beyond the blocks";
  }
}

TEST_P(EachBackendBlocks, CommitOfSeveralIsThatOfEach) {
  for (const auto& [blocks, count] : kCases) {
    const std::vector<int64_t> offsets = Offsets(blocks, count);
    const int64_t all = blocks * count + blocks * (blocks + 1) / 2 + 1;
    MuonCommitArgs args = {.gradient = Device(Normal(all, kSeed + 1)),
                           .orthogonal = Device(Normal(all, kSeed + 2)),
                           .count = count,
                           .mu = 0.95f,
                           .clip = 0.5f,
                           .decay = 0.002f,
                           .scale = 0.02f,
                           .published_dtype = Dtype::kBF16};
    MuonCommitArgs alone = args;
    for (MuonCommitArgs* each : {&args, &alone}) {
      each->momentum = Device(Normal(all, kSeed));
      each->weight = Device(Normal(all, kSeed + 3));
      each->published = Device(std::vector<uint16_t>(all, 7));
      each->square_sums = Device(std::vector<double>(blocks + 1, -1));
    }
    args.offsets = offsets;
    backend_->MuonCommit(stream_, args);
    for (int64_t i = 0; i < blocks; ++i) {
      MuonCommitArgs one = alone;
      one.momentum += offsets[i], one.gradient += offsets[i], one.weight += offsets[i];
      one.orthogonal += offsets[i], one.square_sums += i;
      one.published = static_cast<uint16_t*>(one.published) + offsets[i];
      backend_->MuonCommit(stream_, one);
    }
    EXPECT_EQ(Host(args.momentum, all), Host(alone.momentum, all)) << count;
    EXPECT_EQ(Host(args.weight, all), Host(alone.weight, all)) << count;
    EXPECT_EQ(Host(static_cast<uint16_t*>(args.published), all),
              Host(static_cast<uint16_t*>(alone.published), all))
        << count;
    EXPECT_EQ(Host(args.square_sums, blocks + 1), Host(alone.square_sums, blocks + 1)) << count;
  }
}

TEST_P(EachBackendBlocks, OrthogonalityOfSeveralIsThatOfEach) {
  for (const auto& [rows, cols, blocks] :
       {std::array<int64_t, 3>{1, 3, 4}, {40, 30, 3}, {33, 200, 35}, {260, 130, 3}}) {
    const std::vector<int64_t> offsets = Offsets(blocks, rows * cols);
    OrthogonalityArgs args = {
        .orthogonal = Device(Normal(offsets.back() + rows * cols, kSeed, 0.1f)),
        .offsets = offsets,
        .rows = rows,
        .cols = cols};
    args.square_errors = Device(std::vector<double>(blocks + 1, -1));
    backend_->Orthogonality(stream_, args);
    OrthogonalityArgs one = args;
    one.offsets = kOneBlock;
    one.square_errors = Device(std::vector<double>(blocks + 1, -1));
    for (int64_t i = 0; i < blocks; ++i) {
      one.orthogonal = args.orthogonal + offsets[i];
      backend_->Orthogonality(stream_, one);
      ++one.square_errors;
    }
    EXPECT_EQ(Host(args.square_errors, blocks + 1), Host(one.square_errors - blocks, blocks + 1))
        << blocks << " of " << rows << " x " << cols;
  }
}

// Whether it is given the norms or finds them: Lookahead with M = 0 and mu = 0 leaves those of G.
TEST_P(EachBackendBlocks, NewtonSchulzTakesTheNormsThatLookaheadLeaves) {
  constexpr int64_t kRows = 40, kCols = 72;
  for (const int64_t blocks : {1, 3}) {
    const std::vector<int64_t> offsets = Offsets(blocks, kRows * kCols);
    const int64_t all = offsets.back() + kRows * kCols;
    const std::vector<float> in = Normal(all, kSeed);
    auto plan = PlanNewtonSchulz(*backend_, {}, kRows, kCols, blocks);
    ASSERT_TRUE(plan.ok()) << plan.status();
    NewtonSchulzBatch batch = {.in = Device(in),
                               .out = Device(std::vector<float>(all, -7)),
                               .offsets = offsets,
                               .workspace = Bytes((*plan)->batch_workspace_bytes(blocks))};
    (*plan)->RunBatch(stream_, batch);
    const std::vector<float> found = Host(batch.out, all);

    float* update = Device(std::vector<float>(all));
    auto* norms = Device(std::vector<BlockNorm>(blocks));
    batch.in = update, batch.norms = norms;
    ASSERT_TRUE((*plan)->Prepare(batch).ok());
    batch.out = Device(std::vector<float>(all, -7));  // not what was prepared: enqueued as it is
    for (int repeat = 0; repeat < 3; ++repeat) {
      backend_->Lookahead(stream_, {.momentum = Device(std::vector<float>(all, 0)),
                                    .gradient = Device(in),
                                    .update = update,
                                    .offsets = offsets,
                                    .count = kRows * kCols,
                                    .norms = norms});
      (*plan)->RunBatch(stream_, batch);
      EXPECT_EQ(Host(batch.out, all), found) << blocks << " blocks, repeat " << repeat;
      ASSERT_TRUE((*plan)->Prepare(batch).ok());
      backend_->CopyFromHost(stream_, batch.out, std::vector<float>(all, -7).data(),
                             all * sizeof(float));
      Sync();
    }
  }
}

}  // namespace
}  // namespace dmuon::kernels
