// What tests may ask of the stand-in for libcudart.so.13, by dlsym from the library that the process has loaded.
//
// The stand-in is lazy where a device is asynchronous: operations wait in the order that streams, events and graphs give them,
// and run when the host waits for something, one at a time, in a random order of those that are allowed (DMUON_FAKE_SEED).
// What the host did not wait for may stay undone. So a result that is read without waiting is not there, two operations that
// nothing orders come in either order, and a query moves the device on by one operation.
//
// Device memory starts as NaN and ends at a page that cannot be touched. It can be exported to other processes of this user.
// An operation that would touch memory after it was freed or closed ends the process, and so does a cudaFree of memory that
// another process has open. When the exporter of memory dies, that memory becomes NaN.
//
// The environment:
//   DMUON_FAKE_CUDA_DEVICES       how many devices, or a list of their kinds: "gpu,gpu,mig"; default 1; 0: there is none
//   CUDA_VISIBLE_DEVICES          as CUDA reads it: ordinals or the start of an id, "GPU-..." or "MIG-..."
//   DMUON_FAKE_CUDA_MEMORY        bytes of each device that this process may have; default 4 GiB
//   DMUON_FAKE_CUDA_PEERS         the pairs of devices that can read each other's memory, "0-1,2-3"; "none"; default: all
//   DMUON_FAKE_CUDA_COMPUTE_MODE  "exclusive": one process a device; "prohibited": none; or one of them for each device, with
//                                 commas, where "default" stands for neither
//   DMUON_FAKE_CUDA_NODE          a name: processes with the same one share the devices that are exclusive
//   CUDA_MPS_PIPE_DIRECTORY       as CUDA reads it: with a "control" in it, exclusive devices take any number of processes
//   DMUON_FAKE_CUDA_IPC           "none": the device does not share memory, and says so
//   DMUON_FAKE_CUDA_MALLOC        "pool": what cudaMalloc gives is memory of a pool, which has no handles
//   DMUON_FAKE_CUDA_FAULTS        see fault_script.h
//   DMUON_FAKE_CUDA_REPORT        a path: at its end each process writes PATH.PID, a JSON of its calls, counters and leaks
//   DMUON_FAKE_CUDA_LEAKS         "fail": what is not given back at the end is printed, and the process ends with 99
//   DMUON_FAKE_CUBLASLT_WRONG     "ROWSxCOLUMNS": products of this shape are a tenth too large
//   DMUON_FAKE_ANY_MEMORY         the host's memory passes for the device's: scripts whose tensors torch allocates can be
//                                 rehearsed without a GPU
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
  uint64_t lazy_loads;  // kernels and graphs that their first launch loaded, and nothing before
  uint64_t waits;       // times that the host waited, also inside a copy to pageable memory
  uint64_t default_stream_uses;
  uint64_t imports;  // mappings of other processes' memory that are open now
  uint64_t imports_opened, imports_closed;
};

extern "C" {
FakeCudaCounters fake_cuda_counters();
// Bytes of device memory of one device, or with -1 of page-locked memory, rounded up to 256 each allocation.
struct FakeCudaBytes {
  uint64_t live;
  uint64_t most;  // since the last fake_cuda_forget_most, or ever
};
FakeCudaBytes fake_cuda_bytes(int device);
void fake_cuda_forget_most();
// Calls of this library function so far.
uint64_t fake_cuda_calls(const char* function);
// Adds rules (fault_script.h), whose calls count from now.
void fake_cuda_script(const char* script);
// The nth call from now (1: the next) of this function answers `error` and does nothing. nth = 0 takes back all of them.
void fake_cuda_fail(const char* function, int nth, cudaError_t error);
// What is not given back, a line each; empty when nothing is. At most `bytes` with the end; returns the full length.
size_t fake_cuda_leaks(char* text, size_t bytes);
// The kernels of the modules loaded, a line each: its mangled name, its launches, and "cpu" or "none", whether it has a body
// here. As fake_cuda_leaks.
size_t fake_cuda_kernels(char* text, size_t bytes);

// From now on (or no more) copies and fills are done when they are enqueued, and kernels, products and graphs do nothing: what
// is left is the time of the host. Waits for the device first.
void fake_cuda_instant(int on);

// For the other stand-ins. Counts and obeys the script for a function of theirs; returns the code to answer, 0 to go on.
int fake_cuda_enter(const char* function);
// `operation` runs when its turn comes. False: no such stream.
bool fake_cuda_enqueue(cudaStream_t stream, const std::function<void()>& operation);
// The same, no sooner than `ready` is true. It is asked under the stand-in's lock, and again after each fake_cuda_notify.
bool fake_cuda_enqueue_when(cudaStream_t stream, const std::function<bool()>& ready,
                            const std::function<void()>& operation);
void fake_cuda_notify();
// Runs one operation, if one may run: for a stand-in whose device works on by itself.
void fake_cuda_step();
// The device that a stream belongs to, -1 when there is no such stream; null: the current one.
int fake_cuda_stream_device(cudaStream_t stream);
// Whether [memory, memory + bytes) lies in one living device allocation.
bool fake_cuda_owns(const void* memory, size_t bytes);
// 1: this process has a context on the device of this ordinal.
int fake_cuda_has_context(int ordinal);
// Whether it is memory of another process.
bool fake_cuda_imported(const void* memory);
}

#endif  // DMUON_TESTS_FAKES_FAKE_CUDART_H_
