// The stand-in's rules inside one process: streams, events, graphs, copies, kernels, faults.
#include "tests/fakes/fake_cudart.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <set>
#include <vector>

// What the host stubs of nvcc call.
extern "C" void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int,
                                       uint3*, uint3*, dim3*, dim3*, int*);

namespace dmuon::cuda {
namespace {

constexpr size_t kBytes = 4096;

class FakeCudart : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    stream_ = Stream();
  }
  void TearDown() override {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (cudaStream_t stream : streams_) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    for (cudaEvent_t event : events_) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    for (void* memory : device_) EXPECT_EQ(cudaFree(memory), cudaSuccess);
    for (void* memory : host_) EXPECT_EQ(cudaFreeHost(memory), cudaSuccess);
    char leaks[1024];
    EXPECT_EQ(fake_cuda_leaks(leaks, sizeof(leaks)), 0u) << leaks;
    (void)cudaGetLastError();
  }

  cudaStream_t Stream() {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -5), cudaSuccess);
    streams_.push_back(stream);
    return stream;
  }
  cudaEvent_t Event(unsigned flags = cudaEventDisableTiming) {
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&event, flags), cudaSuccess);
    events_.push_back(event);
    return event;
  }
  char* Device(size_t bytes = kBytes) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
    device_.push_back(memory);
    return static_cast<char*>(memory);
  }
  char* Host(size_t bytes = kBytes) {
    void* memory = nullptr;
    EXPECT_EQ(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), cudaSuccess);
    host_.push_back(memory);
    return static_cast<char*>(memory);
  }
  // Enqueues a copy of the first byte to page-locked memory.
  char* Read(const char* device, cudaStream_t stream) {
    char* host = Host();
    *host = 0;
    EXPECT_EQ(cudaMemcpyAsync(host, device, 1, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    return host;
  }

  // PublishKernel<float, true>, which copies; launched as a module would.
  static cudaError_t LaunchCopy(const float* from, float* to, cudaStream_t stream,
                                unsigned threads = 256) {
    static const char stub = 0;
    static const bool registered = [] {
      __cudaRegisterFunction(nullptr, &stub, nullptr,
                             "_ZN5dmuon4cuda13PublishKernelIfLb1EEEvPKfPT_l", 0, nullptr, nullptr,
                             nullptr, nullptr, nullptr);
      return true;
    }();
    (void)registered;
    int64_t count = kBytes / sizeof(float);
    void* arguments[] = {&from, &to, &count};
    return cudaLaunchKernel(&stub, dim3(1), dim3(threads), arguments, 0, stream);
  }
  static float* Floats(char* memory) { return reinterpret_cast<float*>(memory); }

  cudaStream_t stream_ = nullptr;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<void*> device_, host_;
};

TEST_F(FakeCudart, NewMemoryIsNaNAlignedAndKnown) {
  char* memory = Device(3 << 20);
  float value = 0;
  ASSERT_EQ(cudaMemcpy(&value, memory + (2 << 20), sizeof(value), cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_TRUE(std::isnan(value));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % (2 << 20), 0u);
  cudaPointerAttributes attributes;
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, memory + 100), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.hostPointer, nullptr);
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, &value), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST_F(FakeCudart, TheDriverKnowsTheRangeOfAnAddressAndWhetherItCanBeExported) {
  char* memory = Device(3 << 20);
  void* range = nullptr;
  void* attribute = nullptr;
  ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &range, 13000,
                                             cudaEnableDefault, nullptr),
            cudaSuccess);
  ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuPointerGetAttribute", &attribute, 13000,
                                             cudaEnableDefault, nullptr),
            cudaSuccess);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  const auto inner = reinterpret_cast<CUdeviceptr>(memory + 12345);
  ASSERT_EQ(reinterpret_cast<CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr)>(range)(&base, &bytes,
                                                                                      inner),
            CUDA_SUCCESS);
  EXPECT_EQ(base, reinterpret_cast<CUdeviceptr>(memory));
  EXPECT_EQ(bytes, size_t{3} << 20);
  const auto get =
      reinterpret_cast<CUresult (*)(void*, CUpointer_attribute, CUdeviceptr)>(attribute);
  int capable = 0;
  ASSERT_EQ(get(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, inner), CUDA_SUCCESS);
  EXPECT_EQ(capable, 1);
  void* pool = nullptr;
  ASSERT_EQ(cudaMallocAsync(&pool, 4096, stream_), cudaSuccess);
  ASSERT_EQ(get(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                reinterpret_cast<CUdeviceptr>(pool)),
            CUDA_SUCCESS);
  EXPECT_EQ(capable, 0);
  ASSERT_EQ(cudaFreeAsync(pool, stream_), cudaSuccess);
  cudaDriverEntryPointQueryResult found;
  ASSERT_EQ(
      cudaGetDriverEntryPointByVersion("cuNoSuchThing", &range, 13000, cudaEnableDefault, &found),
      cudaSuccess);
  EXPECT_EQ(found, cudaDriverEntryPointSymbolNotFound);
}

TEST_F(FakeCudart, NothingRunsBeforeSomebodyWaits) {
  char* memory = Device();
  ASSERT_EQ(cudaMemsetAsync(memory, 7, kBytes, stream_), cudaSuccess);
  const char* host = Read(memory, stream_);
  EXPECT_EQ(*host, 0);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(*host, 7);
}

TEST_F(FakeCudart, AQueryMovesTheDeviceOnAndEndsWithSuccess) {
  char* memory = Device();
  const cudaEvent_t event = Event();
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);  // never recorded
  for (int i = 0; i < 3; ++i) ASSERT_EQ(cudaMemsetAsync(memory, i, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady);
  int queries = 0;
  while (cudaEventQuery(event) == cudaErrorNotReady) ++queries;
  EXPECT_EQ(queries, 2);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
}

TEST_F(FakeCudart, AWaitForOneStreamLeavesOthersUndone) {
  bool undone = false;
  for (int i = 0; i < 20 && !undone; ++i) {
    const cudaStream_t other = Stream();
    char* memory = Device();
    ASSERT_EQ(cudaMemsetAsync(memory, 1, kBytes, stream_), cudaSuccess);
    for (int j = 0; j < 8; ++j) ASSERT_EQ(cudaMemsetAsync(memory, 1, kBytes, other), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    undone = cudaStreamQuery(other) == cudaErrorNotReady;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  EXPECT_TRUE(undone);
}

// Two writes that nothing orders come in either order; an event makes it one.
TEST_F(FakeCudart, OnlyAnEventOrdersTwoStreams) {
  for (const bool ordered : {false, true}) {
    std::set<int> seen;
    for (int i = 0; i < 40; ++i) {
      const cudaStream_t other = Stream();
      char* memory = Device();
      ASSERT_EQ(cudaMemsetAsync(memory, 1, kBytes, stream_), cudaSuccess);
      if (ordered) {
        const cudaEvent_t event = Event();
        ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
        ASSERT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
      }
      ASSERT_EQ(cudaMemsetAsync(memory, 2, kBytes, other), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const char* host = Read(memory, stream_);
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      seen.insert(*host);
    }
    EXPECT_EQ(seen, ordered ? std::set<int>({2}) : std::set<int>({1, 2}));
  }
}

TEST_F(FakeCudart, AWaitTakesTheRecordAtThatTime) {
  const cudaStream_t other = Stream();
  const cudaEvent_t event = Event();
  char* memory = Device();
  ASSERT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);  // never recorded: nothing
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  // Recorded again, later: the wait above is not about that.
  ASSERT_EQ(cudaMemsetAsync(memory, 1, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
}

TEST_F(FakeCudart, TimeIsKeptOnlyWhereAskedFor) {
  const cudaEvent_t start = Event(cudaEventDefault), stop = Event(cudaEventDefault),
                    untimed = Event();
  float milliseconds = 0;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, stop), cudaErrorInvalidResourceHandle);
  for (const cudaEvent_t event : {start, stop, untimed})
    ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, stop), cudaErrorNotReady);
  ASSERT_EQ(cudaEventSynchronize(untimed), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, stop), cudaSuccess);
  EXPECT_GT(milliseconds, 0);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, untimed), cudaErrorInvalidResourceHandle);
}

TEST_F(FakeCudart, WhatIsDestroyedIsNoHandle) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, 0), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, stream_), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventDestroy(event), cudaErrorInvalidResourceHandle);
}

TEST_F(FakeCudart, AStreamMayGoBeforeItsWork) {
  cudaStream_t stream = nullptr;
  char* memory = Device();
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory, 5, kBytes, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const char* host = Read(memory, stream_);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(*host, 5);
}

TEST_F(FakeCudart, AStreamHasThePriorityItWasGivenWithinTheRange) {
  int priority = 1;
  ASSERT_EQ(cudaStreamGetPriority(stream_, &priority), cudaSuccess);
  EXPECT_EQ(priority, -5);
}

TEST_F(FakeCudart, ACopyGoesTheWayItSays) {
  char* memory = Device();
  std::vector<char> host(kBytes);
  EXPECT_EQ(cudaMemcpyAsync(memory, host.data(), kBytes, cudaMemcpyDeviceToHost, stream_),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), memory, kBytes, cudaMemcpyHostToDevice, stream_),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(memory, host.data(), kBytes + 256, cudaMemcpyHostToDevice, stream_),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(memory, host.data(), kBytes, cudaMemcpyDefault, stream_), cudaSuccess);
}

TEST_F(FakeCudart, PageableMemoryIsReadAtOnceAndPageLockedWhenTheCopyRuns) {
  char* first = Device();
  char* second = Device();
  char pageable = 1;
  char* locked = Host();
  *locked = 1;
  ASSERT_EQ(cudaMemcpyAsync(first, &pageable, 1, cudaMemcpyHostToDevice, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(second, locked, 1, cudaMemcpyHostToDevice, stream_), cudaSuccess);
  pageable = *locked = 2;
  const char* a = Read(first, stream_);
  const char* b = Read(second, stream_);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(*a, 1);
  EXPECT_EQ(*b, 2);
}

TEST_F(FakeCudart, FreeingWaitsForTheDevice) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory, 1, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
}

TEST_F(FakeCudart, AGraphReplaysWhatWasRecordedAndNothingRunsMeanwhile) {
  char* memory = Device();
  ASSERT_EQ(cudaMemsetAsync(memory, 1, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  const cudaStream_t branch = Stream();
  const cudaEvent_t forked = Event(), joined = Event();
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  ASSERT_EQ(cudaEventRecord(forked, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(branch, forked, 0), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory, 2, kBytes, branch), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(joined, branch), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamWaitEvent(stream_, joined, 0), cudaSuccess);
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  for (const char expected : {1, 2}) {
    const char* host = Read(memory, stream_);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(*host, expected);
    ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
  }
  ASSERT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_F(FakeCudart, EachFunctionIsCountedUnderItsOwnName) {
  for (const char* function : {"cudaStreamCreateWithFlags", "cudaEventCreate"}) {
    const uint64_t before = fake_cuda_calls(function);
    fake_cuda_fail(function, 1, cudaErrorUnknown);
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    EXPECT_EQ(function[4] == 'S' ? cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)
                                 : cudaEventCreate(&event),
              cudaErrorUnknown);
    EXPECT_EQ(fake_cuda_calls(function), before + 1);
  }
}

TEST_F(FakeCudart, ABranchThatDoesNotComeBackSpoilsTheRecording) {
  const cudaStream_t branch = Stream();
  const cudaEvent_t forked = Event();
  char* memory = Device();
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(forked, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(branch, forked, 0), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(memory, 2, kBytes, branch), cudaSuccess);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
}

TEST_F(FakeCudart, AScriptedFailureComesOnceAndAtItsCall) {
  void* memory = nullptr;
  fake_cuda_fail("cudaMalloc", 2, cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  device_.push_back(memory);
  EXPECT_EQ(cudaMalloc(&memory, kBytes), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  device_.push_back(memory);
}

TEST_F(FakeCudart, AScriptedDelayTakesThatLong) {
  fake_cuda_script("cudaStreamSynchronize:1=delay(50ms)");
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(50));
}

TEST_F(FakeCudart, CallsAreCountedByFunction) {
  const uint64_t before = fake_cuda_calls("cudaStreamSynchronize");
  const FakeCudaCounters counters = fake_cuda_counters();
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(fake_cuda_calls("cudaStreamSynchronize"), before + 2);
  EXPECT_EQ(fake_cuda_counters().waits, counters.waits + 2);
  (void)Event();
  EXPECT_EQ(fake_cuda_counters().created, counters.created + 1);
  (void)Device();
  EXPECT_EQ(fake_cuda_counters().allocations, counters.allocations + 1);
  EXPECT_EQ(fake_cuda_counters().live_bytes, counters.live_bytes + kBytes);
}

TEST_F(FakeCudart, BytesAreCountedByDeviceAndPageLockedOnesApart) {
  const FakeCudaBytes device = fake_cuda_bytes(0), locked = fake_cuda_bytes(-1);
  fake_cuda_forget_most();
  void *memory = nullptr, *host = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 1000), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&host, 300), cudaSuccess);
  EXPECT_EQ(fake_cuda_bytes(0).live, device.live + 1024);
  EXPECT_EQ(fake_cuda_bytes(-1).live, locked.live + 512);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  ASSERT_EQ(cudaFreeHost(host), cudaSuccess);
  EXPECT_EQ(fake_cuda_bytes(0).live, device.live);
  EXPECT_EQ(fake_cuda_bytes(0).most, device.live + 1024);
  EXPECT_EQ(fake_cuda_bytes(-1).live, locked.live);
  EXPECT_EQ(fake_cuda_bytes(-1).most, locked.live + 512);
}

TEST_F(FakeCudart, AKernelRunsOnItsStreamsDeviceWithACopyOfItsArguments) {
  char* from = Device();
  char* to = Device();
  ASSERT_EQ(cudaMemsetAsync(from, 0x3f, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(LaunchCopy(Floats(from), Floats(to), stream_), cudaSuccess);
  const char* host = Read(to + kBytes - 1, stream_);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(*host, 0x3f);
  EXPECT_EQ(LaunchCopy(Floats(from), Floats(to), stream_, 2048), cudaErrorInvalidConfiguration);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(LaunchCopy(Floats(from), Floats(to), stream_), cudaErrorInvalidResourceHandle);
  const char unknown = 0;
  EXPECT_EQ(cudaLaunchKernel(&unknown, dim3(1), dim3(1), nullptr, 0, nullptr),
            cudaErrorInvalidDeviceFunction);
}

TEST_F(FakeCudart, AnEventBelongsToItsStreamsDevice) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  const cudaEvent_t event = Event();
  EXPECT_EQ(cudaEventRecord(event, stream_), cudaErrorInvalidResourceHandle);
}

// In a process of its own: a failed device stays so.
TEST_F(FakeCudart, AFailureOfTheDeviceIsSeenByTheNextWaitAndStays) {
  EXPECT_EXIT(
      {
        char* memory = Device();
        fake_cuda_script("execute:1=fail(700)");
        (void)cudaMemsetAsync(memory, 1, kBytes, stream_);
        const bool seen = cudaStreamSynchronize(stream_) == cudaErrorIllegalAddress &&
                          cudaMemsetAsync(memory, 1, kBytes, stream_) == cudaErrorIllegalAddress;
        std::_Exit(seen ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(FakeCudart, MemoryEndsAtAPageThatCannotBeTouched) {
  EXPECT_DEATH(Device(4096)[4096] = 0, "");
}

TEST_F(FakeCudart, FreeingUnderAnotherDevicesWaitingOperationEndsTheProcess) {
  EXPECT_DEATH(
      {
        char* memory = Device();
        (void)cudaSetDevice(1);
        (void)cudaMemsetAsync(memory, 1, kBytes, Stream());
        (void)cudaFree(memory);
      },
      "freeing of memory that a waiting operation touches");
}

TEST_F(FakeCudart, AKernelReachesItsPeersMemoryOnceItHasAccess) {
  for (const bool access : {true, false}) {
    EXPECT_EXIT(
        {
          char* there = Device();
          (void)cudaSetDevice(1);
          if (access) (void)cudaDeviceEnablePeerAccess(0, 0);
          const cudaStream_t here = Stream();
          (void)LaunchCopy(Floats(there), Floats(Device()), here);
          std::_Exit(cudaStreamSynchronize(here));
        },
        testing::ExitedWithCode(access ? 0 : static_cast<int>(cudaErrorIllegalAddress) & 0xff), "");
  }
}

// Touching another device's memory without access fails the device as well.
TEST_F(FakeCudart, APeersMemoryNeedsAccess) {
  EXPECT_EXIT(
      {
        char* memory = Device();
        (void)cudaSetDevice(1);
        const cudaStream_t there = Stream();
        (void)cudaMemsetAsync(memory, 1, kBytes, there);
        std::_Exit(cudaStreamSynchronize(there) == cudaErrorIllegalAddress ? 0 : 1);
      },
      testing::ExitedWithCode(0), "no access to its peer");
}

}  // namespace
}  // namespace dmuon::cuda

int main(int argc, char** argv) {
  setenv("DMUON_FAKE_CUDA_DEVICES", "2", 1);
  testing::InitGoogleTest(&argc, argv);
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  return RUN_ALL_TESTS();
}
