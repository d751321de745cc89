#include "tests/fakes/fake_cudart.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace {

using Task = std::function<void()>;

// One operation of the device. It may run when all of `after` have.
struct Node {
  Task task;
  std::vector<std::shared_ptr<Node>> after;
  bool done = false;
};
using NodePtr = std::shared_ptr<Node>;

struct Capture;

}  // namespace

struct CUstream_st {
  NodePtr last;
  Capture* capture = nullptr;
};

struct CUevent_st {
  NodePtr node;  // null: never recorded, counts as done
  Capture* capture = nullptr;
  double milliseconds = 0;
};

struct CUgraph_st {
  std::vector<NodePtr> nodes;  // in the order of recording, so each after those it needs
};

struct CUgraphExec_st {
  std::vector<NodePtr> nodes;
};

namespace {

struct Capture {
  CUgraph_st* graph = nullptr;
  CUstream_st* origin = nullptr;
  std::set<CUstream_st*> streams;
  bool broken = false;
};

struct Allocation {
  char* mapping;
  size_t mapped, bytes;
};

struct KernelEntry {
  std::string name;
};

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};

struct Failure {
  int countdown;
  cudaError_t error;
};

using Launch = Task (*)(void** arguments, dim3 grid, dim3 block);

// Everything, behind one lock: tests have few threads, and order is what they are about.
struct World {
  std::recursive_mutex mutex;
  std::vector<NodePtr> pending;
  std::map<char*, Allocation> device, host;
  std::set<CUstream_st*> streams;
  std::map<std::string, Failure> failures;
  std::mt19937 random{[] {
    const char* seed = std::getenv("DMUON_FAKE_SEED");
    return seed != nullptr ? static_cast<unsigned>(std::atoi(seed)) : 1u;
  }()};
  FakeCudaCounters counters = {};
  CUstream_st default_stream;
  double clock = 0;  // what events read: each operation takes a millisecond
};

// Made on first use: kernels register themselves before main, in an order that nobody states.
World& W() {
  static auto* const world = new World();
  return *world;
}

// A function-local static for the same reason.
std::map<const void*, KernelEntry>& KernelTable() {
  static auto* const table = new std::map<const void*, KernelEntry>();
  return *table;
}

thread_local cudaError_t t_last = cudaSuccess;
thread_local std::vector<CallConfiguration> t_configurations;

cudaError_t Answer(cudaError_t error) {
  if (error != cudaSuccess) t_last = error;
  return error;
}

// The scripted failure of this call, if it is its turn.
cudaError_t Scripted(const char* function) {
  const auto found = W().failures.find(function);
  if (found == W().failures.end() || --found->second.countdown > 0) return cudaSuccess;
  const cudaError_t error = found->second.error;
  W().failures.erase(found);
  return error;
}

#define ENTER(function)            \
  std::lock_guard lock(W().mutex); \
  if (cudaError_t scripted = Scripted(function); scripted != cudaSuccess) return Answer(scripted)

bool Ready(const Node& node) {
  return std::all_of(node.after.begin(), node.after.end(),
                     [](const NodePtr& n) { return n->done; });
}

void RunAll() {
  World& w = W();
  while (!w.pending.empty()) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < w.pending.size() && ready.size() < 16; ++i) {
      if (Ready(*w.pending[i])) ready.push_back(i);
    }
    if (ready.empty()) {
      std::fprintf(stderr, "fake_cudart: operations that wait for each other\n");
      std::abort();
    }
    const size_t pick = ready[w.random() % ready.size()];
    const NodePtr node = w.pending[pick];
    w.pending.erase(w.pending.begin() + static_cast<std::ptrdiff_t>(pick));
    if (node->task) node->task();
    ++w.clock;
    node->done = true;
    node->after.clear();
  }
}

CUstream_st* Real(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread)
    return stream;
  ++W().counters.default_stream_uses;
  return &W().default_stream;
}

void Enqueue(cudaStream_t stream, Task task) {
  CUstream_st* s = Real(stream);
  auto node = std::make_shared<Node>();
  node->task = std::move(task);
  if (s->last != nullptr) node->after.push_back(s->last);
  s->last = node;
  if (s->capture != nullptr) {
    s->capture->graph->nodes.push_back(node);
  } else {
    W().pending.push_back(node);
  }
}

void EndOfWait() {
  ++W().counters.waits;
  RunAll();
}

std::map<char*, Allocation>::iterator Find(std::map<char*, Allocation>& in, const void* memory) {
  auto at = in.upper_bound(static_cast<char*>(const_cast<void*>(memory)));
  if (at == in.begin()) return in.end();
  --at;
  return static_cast<const char*>(memory) < at->first + at->second.bytes ? at : in.end();
}

// DMUON_FAKE_ANY_MEMORY: the host's memory passes for the device's, so that scripts whose tensors torch allocates can be
// rehearsed without a GPU.
bool AnyMemory() {
  static const bool any = std::getenv("DMUON_FAKE_ANY_MEMORY") != nullptr;
  return any;
}

bool Owns(std::map<char*, Allocation>& in, const void* memory, size_t bytes) {
  const auto at = Find(in, memory);
  return at != in.end() && static_cast<const char*>(memory) + bytes <= at->first + at->second.bytes;
}

cudaError_t Map(std::map<char*, Allocation>& in, void** memory, size_t bytes) {
  constexpr size_t kPage = 4096;
  constexpr size_t kAlignment = 256;
  constexpr size_t kPoisoned = 4 << 20;  // of a workspace of many megabytes nothing is read
  constexpr size_t kMost = size_t{4} << 30;
  if (bytes > kMost) return cudaErrorMemoryAllocation;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t pages = (rounded + kPage - 1) / kPage * kPage;
  void* mapping =
      mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
  char* base = static_cast<char*>(mapping);
  std::memset(base, 0xff, std::min(pages, kPoisoned));
  mprotect(base + pages, kPage, PROT_NONE);
  char* user = base + pages - rounded;
  in[user] = {base, pages + kPage, rounded};
  ++W().counters.allocations;
  *memory = user;
  return cudaSuccess;
}

cudaError_t Unmap(std::map<char*, Allocation>& in, void* memory) {
  const auto at = in.find(static_cast<char*>(memory));
  if (at == in.end()) return cudaErrorInvalidValue;
  munmap(at->second.mapping, at->second.mapped);
  in.erase(at);
  ++W().counters.frees;
  return cudaSuccess;
}

Launch FindKernel(const std::string& name) {
  static const auto find = [] {
    void* library = dlopen("libdmuon_kernels_on_cpu.so", RTLD_NOW);
    if (library == nullptr) std::fprintf(stderr, "fake_cudart: %s\n", dlerror());
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Launch (*)(const char*)>(dlsym(library, "cuda_on_cpu_find"));
  }();
  return find != nullptr ? find(name.c_str()) : nullptr;
}

cudaError_t LaunchKernel(const KernelEntry& kernel, dim3 grid, dim3 block, void** arguments,
                         size_t shared, cudaStream_t stream) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 || threads > 1024 ||
      grid.y > 65535 || grid.z > 65535 || shared > 48 * 1024) {
    return cudaErrorInvalidConfiguration;
  }
  const Launch launch = FindKernel(kernel.name);
  if (launch == nullptr) {
    std::fprintf(stderr, "fake_cudart: no kernel %s on the CPU\n", kernel.name.c_str());
    return cudaErrorInvalidDeviceFunction;
  }
  ++W().counters.launches;
  Enqueue(stream, launch(arguments, grid, block));
  return cudaSuccess;
}

// A graph's nodes as new operations of `stream`.
void Replay(const std::vector<NodePtr>& nodes, cudaStream_t stream) {
  CUstream_st* s = Real(stream);
  std::map<const Node*, NodePtr> copies;
  auto end = std::make_shared<Node>();
  const NodePtr before = s->last;
  for (const NodePtr& node : nodes) {
    auto copy = std::make_shared<Node>();
    copy->task = node->task;
    for (const NodePtr& after : node->after) copy->after.push_back(copies.at(after.get()));
    if (copy->after.empty() && before != nullptr) copy->after.push_back(before);
    copies[node.get()] = copy;
    end->after.push_back(copy);
    W().pending.push_back(copy);
  }
  if (nodes.empty() && before != nullptr) end->after.push_back(before);
  W().pending.push_back(end);
  s->last = end;
}

// Whether everything in the graph comes before the origin's last operation.
bool Joined(const Capture& capture) {
  std::set<const Node*> reached;
  std::vector<const Node*> open = {capture.origin->last.get()};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !reached.insert(node).second) continue;
    for (const NodePtr& after : node->after) open.push_back(after.get());
  }
  return std::all_of(capture.graph->nodes.begin(), capture.graph->nodes.end(),
                     [&](const NodePtr& n) { return reached.count(n.get()) > 0; });
}

}  // namespace

extern "C" {

FakeCudaCounters fake_cuda_counters() {
  std::lock_guard lock(W().mutex);
  FakeCudaCounters counters = W().counters;
  counters.streams = W().streams.size();
  for (const auto& [memory, allocation] : W().device) counters.live_bytes += allocation.bytes;
  return counters;
}

void fake_cuda_fail(const char* function, int nth, cudaError_t error) {
  std::lock_guard lock(W().mutex);
  W().failures.erase(function);
  if (nth > 0) W().failures[function] = {nth, error};
}

void fake_cuda_enqueue(cudaStream_t stream, const Task& operation) {
  std::lock_guard lock(W().mutex);
  ++W().counters.launches;
  Enqueue(stream, operation);
}

bool fake_cuda_owns(const void* memory, size_t bytes) {
  std::lock_guard lock(W().mutex);
  return AnyMemory() || Owns(W().device, memory, bytes);
}

// ---- device

cudaError_t cudaGetDeviceCount(int* count) {
  ENTER("cudaGetDeviceCount");
  const char* devices = std::getenv("DMUON_FAKE_DEVICES");
  *count = devices != nullptr ? std::atoi(devices) : 1;
  return Answer(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  ENTER("cudaSetDevice");
  int count = 0;
  (void)cudaGetDeviceCount(&count);
  return Answer(device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  ENTER("cudaGetDeviceProperties");
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "Fake GPU");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER("cudaDeviceGetStreamPriorityRange");
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{4} << 30;
  *free = *total / 2;
  return cudaSuccess;
}

// ---- errors

cudaError_t cudaGetLastError() {
  const cudaError_t last = t_last;
  t_last = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() { return t_last; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    default: return "cudaErrorFake";
  }
}
const char* cudaGetErrorString(cudaError_t) { return "from the stand-in"; }

// ---- memory

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  ENTER("cudaMalloc");
  return Answer(Map(W().device, memory, bytes));
}
cudaError_t cudaFree(void* memory) {
  ENTER("cudaFree");
  if (memory == nullptr) return cudaSuccess;
  EndOfWait();
  return Answer(Unmap(W().device, memory));
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  ENTER("cudaHostAlloc");
  return Answer(Map(W().host, memory, bytes));
}
cudaError_t cudaFreeHost(void* memory) {
  ENTER("cudaFreeHost");
  EndOfWait();
  return Answer(Unmap(W().host, memory));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ENTER("cudaMemcpyAsync");
  const bool to_device = Owns(W().device, to, bytes);
  const bool from_device = Owns(W().device, from, bytes);
  switch (kind) {
    case cudaMemcpyHostToDevice:
      if (!to_device || from_device) return Answer(cudaErrorInvalidValue);
      // Pageable memory is read before the call returns; page-locked memory when the copy runs.
      if (Owns(W().host, from, bytes)) break;
      Enqueue(stream, [to, staged = std::string(static_cast<const char*>(from), bytes)] {
        std::memcpy(to, staged.data(), staged.size());
      });
      return cudaSuccess;
    case cudaMemcpyDeviceToHost:
      if (to_device || !from_device) return Answer(cudaErrorInvalidValue);
      if (Owns(W().host, to, bytes)) break;
      Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
      EndOfWait();
      return cudaSuccess;
    case cudaMemcpyDeviceToDevice:
      if (!to_device || !from_device) return Answer(cudaErrorInvalidValue);
      break;
    default: return Answer(cudaErrorInvalidValue);
  }
  Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  ENTER("cudaMemsetAsync");
  if (!Owns(W().device, to, bytes)) return Answer(cudaErrorInvalidValue);
  Enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

// ---- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  ENTER("cudaStreamCreate");
  if (flags != cudaStreamNonBlocking)
    return Answer(cudaErrorInvalidValue);  // would wait for the default stream
  *stream = new CUstream_st();
  W().streams.insert(*stream);
  ++W().counters.created;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER("cudaStreamDestroy");
  if (W().streams.erase(stream) == 0) return Answer(cudaErrorInvalidValue);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER("cudaStreamSynchronize");
  if (Real(stream)->capture != nullptr) return Answer(cudaErrorStreamCaptureUnsupported);
  EndOfWait();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER("cudaEventCreate");
  *event = new CUevent_st();
  ++W().counters.events;
  ++W().counters.created;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER("cudaEventDestroy");
  RunAll();  // its time may still be written
  delete event;
  --W().counters.events;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER("cudaEventRecord");
  CUstream_st* s = Real(stream);
  event->capture = s->capture;
  if (s->capture == nullptr) Enqueue(stream, [event] { event->milliseconds = W().clock; });
  event->node = s->last;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER("cudaStreamWaitEvent");
  CUstream_st* s = Real(stream);
  if (event->node == nullptr && event->capture == nullptr) return cudaSuccess;
  if (event->capture != nullptr && s->capture == nullptr) {
    s->capture = event->capture;  // joins the recording
    s->capture->streams.insert(s);
    s->last = nullptr;
  }
  if (s->capture != event->capture) return Answer(cudaErrorStreamCaptureIsolation);
  const NodePtr node = event->node;
  Enqueue(stream, nullptr);
  if (node != nullptr) s->last->after.push_back(node);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  ENTER("cudaEventSynchronize");
  EndOfWait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  ENTER("cudaEventElapsedTime");
  *milliseconds = static_cast<float>(stop->milliseconds - start->milliseconds);
  return cudaSuccess;
}

// ---- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  ENTER("cudaStreamBeginCapture");
  CUstream_st* s = Real(stream);
  if (s == &W().default_stream || s->capture != nullptr)
    return Answer(cudaErrorStreamCaptureUnsupported);
  s->capture = new Capture{new CUgraph_st(), s, {s}, false};
  s->last = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER("cudaStreamEndCapture");
  Capture* capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return Answer(cudaErrorIllegalState);
  const bool joined = Joined(*capture);
  for (CUstream_st* s : capture->streams) {
    s->capture = nullptr;
    s->last = nullptr;
  }
  *graph = joined ? capture->graph : nullptr;
  if (!joined) delete capture->graph;
  delete capture;
  return Answer(joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  ENTER("cudaGraphInstantiate");
  *executable = new CUgraphExec_st{graph->nodes};
  ++W().counters.graphs;
  ++W().counters.created;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  ENTER("cudaGraphExecDestroy");
  RunAll();
  delete executable;
  --W().counters.graphs;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER("cudaGraphLaunch");
  ++W().counters.launches;
  Replay(executable->nodes, stream);
  return cudaSuccess;
}

// ---- what the host stubs of nvcc 13 call

void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  KernelTable()[stub] = {name};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  t_configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const CallConfiguration c = t_configurations.back();
  t_configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<void**>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  const auto found = KernelTable().find(stub);
  if (found == KernelTable().end()) return Answer(cudaErrorInvalidDeviceFunction);
  *kernel = reinterpret_cast<cudaKernel_t>(&found->second);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  ENTER("cudaLaunchKernel");
  return Answer(LaunchKernel(*reinterpret_cast<KernelEntry*>(kernel), grid, block, arguments,
                             shared, stream));
}
cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  cudaKernel_t kernel;
  const cudaError_t error = __cudaGetKernel(&kernel, stub);
  return error != cudaSuccess ? error
                              : __cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

}  // extern "C"
