// What tests may ask of the stand-in for libcudart.so.13, by dlsym from the library that the process has loaded.
//
// The stand-in is lazy where a device is asynchronous: operations wait in the order that streams, events and graphs give them,
// and run when the host waits for something, one at a time, in a random order of those that are allowed (DMUON_FAKE_SEED).
// So a result that is read without waiting is not there, and two operations that nothing orders come in either order.
//
// Device memory starts as NaN and ends at a page that cannot be touched.
#ifndef DMUON_TESTS_FAKES_FAKE_CUDART_H_
#define DMUON_TESTS_FAKES_FAKE_CUDART_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

// Since the process started.
struct FakeCudaCounters {
  uint64_t allocations, frees;       // of device and page-locked memory
  uint64_t live_bytes;               // of device memory
  uint64_t streams, events, graphs;  // living
  uint64_t created;                  // streams, events and graphs ever made
  uint64_t launches;                 // kernels, products and graphs
  uint64_t waits;  // times that the host waited, also inside a copy to pageable memory
  uint64_t default_stream_uses;
};

extern "C" {
FakeCudaCounters fake_cuda_counters();
// The nth call from now (1: the next) of this function answers `error` and does nothing. nth = 0 takes it back.
void fake_cuda_fail(const char* function, int nth, cudaError_t error);
// For the other stand-ins. `operation` runs when its turn comes.
void fake_cuda_enqueue(cudaStream_t stream, const std::function<void()>& operation);
// Whether [memory, memory + bytes) lies in one living device allocation.
bool fake_cuda_owns(const void* memory, size_t bytes);
}

#endif  // DMUON_TESTS_FAKES_FAKE_CUDART_H_
