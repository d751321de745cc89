// The rules of the stand-in for NCCL.
#include "tests/fakes/fake_nccl.h"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <signal.h>

#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda/cuda_process.h"
#include "tests/fakes/fake_cudart.h"

namespace dmuon::cuda {
namespace {

using testing::HasSubstr;

constexpr size_t kCount = 1000;

// One rank: a device, a stream, memory, a communicator.
struct Rank {
  int device;
  cudaStream_t stream = nullptr;
  float *in = nullptr, *out = nullptr;
  ncclComm_t comm = nullptr;

  explicit Rank(int on) : device(on) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&in), kCount * 4), cudaSuccess);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&out), 4 * kCount * 4), cudaSuccess);
  }
  ~Rank() {
    if (comm != nullptr) (void)ncclCommAbort(comm);
    (void)cudaSetDevice(device);
    (void)cudaFree(in);
    (void)cudaFree(out);
    (void)cudaStreamDestroy(stream);
  }
  Rank(const Rank&) = delete;

  ncclResult_t Init(const ncclUniqueId& id, int ranks, int rank) {
    (void)cudaSetDevice(device);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return ncclCommInitRankConfig(&comm, ranks, id, rank, &config);
  }
  ncclResult_t State() const {
    ncclResult_t state = ncclInternalError;
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    return state;
  }
  // Until it is no longer in progress.
  ncclResult_t Settled() const {
    ncclResult_t state;
    while ((state = State()) == ncclInProgress) std::this_thread::yield();
    return state;
  }
  void Fill(float value) {
    const std::vector<float> host(kCount, value);
    EXPECT_EQ(cudaMemcpyAsync(in, host.data(), kCount * 4, cudaMemcpyHostToDevice, stream),
              cudaSuccess);
  }
  std::vector<float> Out(size_t count = kCount) {
    std::vector<float> host(count);
    EXPECT_EQ(cudaMemcpyAsync(host.data(), out, count * 4, cudaMemcpyDeviceToHost, stream),
              cudaSuccess);
    return host;
  }
};

class FakeNccl : public testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(fake_nccl_communicators(), 0); }

  static ncclUniqueId Id() {
    ncclUniqueId id;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    return id;
  }
  static void InitAll(std::vector<std::unique_ptr<Rank>>& ranks) {
    const ncclUniqueId id = Id();
    const int count = static_cast<int>(ranks.size());
    for (int r = 0; r < count; ++r) EXPECT_EQ(ranks[r]->Init(id, count, r), ncclInProgress);
    for (const auto& rank : ranks) EXPECT_EQ(rank->Settled(), ncclSuccess);
  }
  static std::vector<std::unique_ptr<Rank>> Ranks(int count) {
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < count; ++r) ranks.push_back(std::make_unique<Rank>(r));
    InitAll(ranks);
    return ranks;
  }
  // As one call for all ranks.
  template <typename F>
  static void Grouped(const std::vector<std::unique_ptr<Rank>>& ranks, const F& call) {
    EXPECT_EQ(ncclGroupStart(), ncclSuccess);
    for (size_t r = 0; r < ranks.size(); ++r)
      EXPECT_EQ(call(*ranks[r], static_cast<int>(r)), ncclSuccess);
    EXPECT_EQ(ncclGroupEnd(), ncclInProgress);
    for (const auto& rank : ranks) EXPECT_EQ(rank->Settled(), ncclSuccess);
  }
  static std::string Disorder() {
    std::string text(fake_nccl_disorder(nullptr, 0) + 1, 0);
    fake_nccl_disorder(text.data(), text.size());
    return text;
  }
};

TEST_F(FakeNccl, SumsBroadcastsReducesGathersAndScatters) {
  const auto ranks = Ranks(3);
  for (int r = 0; r < 3; ++r) ranks[r]->Fill(static_cast<float>(1 << r));
  Grouped(ranks, [](Rank& r, int) {
    return ncclAllReduce(r.in, r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream);
  });
  for (const auto& r : ranks) EXPECT_THAT(r->Out(), testing::Each(7.0f));
  Grouped(ranks, [](Rank& r, int) {
    return ncclBroadcast(r.in, r.out, kCount, ncclFloat, 2, r.comm, r.stream);
  });
  for (const auto& r : ranks) EXPECT_THAT(r->Out(), testing::Each(4.0f));
  Grouped(ranks, [](Rank& r, int) {
    return ncclReduce(r.in, r.out, kCount, ncclFloat, ncclMax, 1, r.comm, r.stream);
  });
  EXPECT_THAT(ranks[1]->Out(), testing::Each(4.0f));
  Grouped(ranks, [](Rank& r, int) {
    return ncclAllGather(r.in, r.out, kCount, ncclFloat, r.comm, r.stream);
  });
  for (const auto& r : ranks) {
    const std::vector<float> all = r->Out(3 * kCount);
    EXPECT_EQ(all[0], 1);
    EXPECT_EQ(all[kCount], 2);
    EXPECT_EQ(all[2 * kCount], 4);
  }
  Grouped(ranks, [](Rank& r, int) {
    return ncclReduceScatter(r.in, r.out, kCount / 4, ncclFloat, ncclSum, r.comm, r.stream);
  });
  for (const auto& r : ranks) EXPECT_THAT(r->Out(kCount / 4), testing::Each(7.0f));
}

TEST_F(FakeNccl, SendsMeetTheirReceivesInOrder) {
  const auto ranks = Ranks(2);
  ranks[0]->Fill(5);
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  ASSERT_EQ(ncclSend(ranks[0]->in, kCount, ncclFloat, 1, ranks[0]->comm, ranks[0]->stream),
            ncclSuccess);
  ASSERT_EQ(ncclRecv(ranks[1]->out, kCount, ncclFloat, 0, ranks[1]->comm, ranks[1]->stream),
            ncclSuccess);
  ASSERT_EQ(ncclGroupEnd(), ncclInProgress);
  EXPECT_THAT(ranks[1]->Out(), testing::Each(5.0f));
}

TEST_F(FakeNccl, TwoOrdersAreReportedAndNeverComplete) {
  const auto ranks = Ranks(2);
  const size_t before = Disorder().size();
  ASSERT_EQ(ncclAllReduce(ranks[0]->in, ranks[0]->out, kCount, ncclFloat, ncclSum, ranks[0]->comm,
                          ranks[0]->stream),
            ncclInProgress);
  ASSERT_EQ(ncclBroadcast(ranks[1]->in, ranks[1]->out, kCount, ncclFloat, 0, ranks[1]->comm,
                          ranks[1]->stream),
            ncclInProgress);
  while (Disorder().size() == before) std::this_thread::yield();
  EXPECT_THAT(Disorder(), HasSubstr("issued all-reduce of 1000"));
  EXPECT_THAT(Disorder(), HasSubstr("issued broadcast of 1000"));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(cudaStreamQuery(ranks[0]->stream), cudaErrorNotReady);
  // An abort lets the stream go.
  ASSERT_EQ(ncclCommAbort(std::exchange(ranks[0]->comm, nullptr)), ncclSuccess);
  EXPECT_EQ(cudaStreamSynchronize(ranks[0]->stream), cudaSuccess);
}

TEST_F(FakeNccl, TwoRanksOnOneDeviceAreRefused) {
  Rank a(0), b(0);
  const ncclUniqueId id = Id();
  ASSERT_EQ(a.Init(id, 2, 0), ncclInProgress);
  ASSERT_EQ(b.Init(id, 2, 1), ncclInProgress);
  EXPECT_EQ(a.Settled(), ncclInvalidUsage);
  EXPECT_EQ(b.Settled(), ncclInvalidUsage);
}

TEST_F(FakeNccl, AnIdServesOnce) {
  Rank a(0), b(0);
  const ncclUniqueId id = Id();
  ASSERT_EQ(a.Init(id, 1, 0), ncclInProgress);
  ASSERT_EQ(a.Settled(), ncclSuccess);
  ASSERT_EQ(b.Init(id, 1, 0), ncclInProgress);
  EXPECT_EQ(b.Settled(), ncclInvalidUsage);
}

TEST_F(FakeNccl, ARankThatDoesNotComeLeavesTheOthersInProgress) {
  Rank a(0);
  ASSERT_EQ(a.Init(Id(), 2, 0), ncclInProgress);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(a.State(), ncclInProgress);
}

TEST_F(FakeNccl, ACallInProgressTakesNoOther) {
  const auto ranks = Ranks(1);
  Rank& r = *ranks[0];
  ASSERT_EQ(ncclAllReduce(r.in, r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInProgress);
  EXPECT_EQ(ncclAllReduce(r.in, r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInvalidUsage);
  EXPECT_EQ(r.Settled(), ncclSuccess);
  EXPECT_EQ(ncclAllReduce(r.in, r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInProgress);
}

TEST_F(FakeNccl, OnlyMemoryOfTheDeviceAndOfThisProcessIsTaken) {
  const auto ranks = Ranks(1);
  Rank& r = *ranks[0];
  std::vector<float> host(kCount);
  EXPECT_EQ(ncclAllReduce(host.data(), r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInvalidUsage);
  EXPECT_EQ(ncclAllReduce(r.in, r.out, kCount + 100, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInvalidUsage);
  CudaProcess trainer;
  const std::string hex = trainer.Do("handle " + trainer.Do("malloc 4096"));
  cudaIpcMemHandle_t handle;
  for (size_t i = 0; i < sizeof(handle); ++i)
    handle.reserved[i] = static_cast<char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  void* arena = nullptr;
  ASSERT_EQ(cudaIpcOpenMemHandle(&arena, handle, cudaIpcMemLazyEnablePeerAccess), cudaSuccess);
  EXPECT_EQ(ncclAllReduce(arena, r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInvalidUsage);
  ASSERT_EQ(cudaIpcCloseMemHandle(arena), cudaSuccess);
}

TEST_F(FakeNccl, AnAsynchronousErrorShowsOnItsCommunicatorAndTheOthersHang) {
  const auto ranks = Ranks(2);
  fake_cuda_script("ncclAsyncError:2=fail(6)");  // of the second rank
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  for (const auto& r : ranks) {
    ASSERT_EQ(ncclAllReduce(r->in, r->out, kCount, ncclFloat, ncclSum, r->comm, r->stream),
              ncclSuccess);
  }
  ASSERT_EQ(ncclGroupEnd(), ncclInProgress);
  ASSERT_EQ(ranks[0]->Settled(), ncclSuccess);
  while (ranks[1]->State() != ncclRemoteError) std::this_thread::yield();
  EXPECT_EQ(ranks[0]->State(), ncclSuccess);
  EXPECT_EQ(cudaStreamQuery(ranks[0]->stream), cudaErrorNotReady);
}

TEST_F(FakeNccl, AHangNeverEnds) {
  const auto ranks = Ranks(1);
  Rank& r = *ranks[0];
  fake_cuda_script("ncclHang:1=fail(1)");
  ASSERT_EQ(ncclAllReduce(r.in, r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInProgress);
  EXPECT_EQ(r.Settled(), ncclSuccess);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(cudaStreamQuery(r.stream), cudaErrorNotReady);
}

TEST_F(FakeNccl, AnAbortCanBeMadeToTakeLong) {
  const auto ranks = Ranks(1);
  fake_cuda_script("ncclCommAbort:1=block(30ms)");
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(ncclCommAbort(std::exchange(ranks[0]->comm, nullptr)), ncclSuccess);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
}

TEST_F(FakeNccl, FinalizingWaitsForWhatWasIssued) {
  const auto ranks = Ranks(1);
  Rank& r = *ranks[0];
  ASSERT_EQ(ncclAllReduce(r.in, r.out, kCount, ncclFloat, ncclSum, r.comm, r.stream),
            ncclInProgress);
  ASSERT_EQ(r.Settled(), ncclSuccess);
  ASSERT_EQ(ncclCommFinalize(r.comm), ncclInProgress);
  EXPECT_EQ(r.Settled(), ncclSuccess);
  EXPECT_EQ(cudaStreamQuery(r.stream), cudaSuccess);
  EXPECT_EQ(ncclCommDestroy(std::exchange(r.comm, nullptr)), ncclSuccess);
}

}  // namespace
}  // namespace dmuon::cuda

int main(int argc, char** argv) {
  if (dmuon::cuda::IsCudaProcess(argc, argv)) return dmuon::cuda::RunCudaProcess();
  setenv("DMUON_FAKE_CUDA_DEVICES", "3", 1);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
