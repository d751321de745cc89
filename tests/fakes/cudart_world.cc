#include "tests/fakes/cudart_world.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace dmuon_fakes {

thread_local cudaError_t t_last = cudaSuccess;
thread_local int t_device = 0;

World& W() {
  static auto* const world = [] {
    auto* made = new World();
    const char* seed = std::getenv("DMUON_FAKE_SEED");
    made->random.seed(seed != nullptr ? static_cast<unsigned>(std::atoi(seed)) : 1u);
    return made;
  }();
  return *world;
}

cudaError_t Answer(cudaError_t error) {
  if (error != cudaSuccess) t_last = error;
  return error;
}

Call::Call(const char* function, Needs needs) {
  const int scripted = FaultScript::Get().Enter(function);
  lock_ = std::unique_lock(W().mutex);
  World& w = W();
  if (w.pid == 0) w.pid = getpid();
  if (scripted != 0) {
    error_ = static_cast<cudaError_t>(scripted);
  } else if (w.pid != getpid()) {
    error_ = cudaErrorInitializationError;  // CUDA does not survive a fork
  } else if (w.sticky != cudaSuccess) {
    error_ = w.sticky;
  } else if (needs == Needs::kContext) {
    error_ = MakeContext(t_device);
  }
  (void)Answer(error_);
}

CUstream_st* Real(cudaStream_t stream) {
  World& w = W();
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    ++w.counters.default_stream_uses;
    std::unique_ptr<CUstream_st>& made = w.default_streams[t_device];
    if (made == nullptr) {
      made = std::make_unique<CUstream_st>();
      made->device = t_device;
    }
    return made.get();
  }
  return w.streams.count(stream) > 0 ? stream : nullptr;
}

Node& Enqueue(CUstream_st* stream, Task task, std::vector<uintptr_t> words) {
  if (W().instant && stream->capture == nullptr) {
    if (task) task();
    stream->last = nullptr;
    thread_local Node done;
    done = Node();
    return done;
  }
  auto node = std::make_shared<Node>();
  node->task = std::move(task);
  node->words = std::move(words);
  node->device = stream->device;
  if (stream->last != nullptr) node->after.push_back(stream->last);
  stream->last = node;
  if (stream->capture != nullptr) {
    stream->capture->graph->nodes.push_back(node);
  } else {
    W().pending.push_back(node);
  }
  return *node;
}

namespace {

bool Ready(const Node& node) {
  return std::all_of(node.after.begin(), node.after.end(),
                     [](const NodePtr& n) { return n->done; }) &&
         (!node.ready || node.ready());
}

// A kernel that touches what its device cannot reach fails as a whole, and the device with it.
bool Reaches(const Node& node) {
  if (node.copies) return true;
  for (const uintptr_t word : node.words) {
    const auto at = Find(reinterpret_cast<const void*>(word));
    if (at == W().memory.end() || at->second.kind == Memory::Kind::kHost) continue;
    const int home = at->second.device;
    if (home != node.device && W().devices[static_cast<size_t>(node.device)].peers.count(home) == 0)
      return false;
  }
  return true;
}

void Run(size_t index) {
  World& w = W();
  const NodePtr node = w.pending[index];
  w.pending.erase(w.pending.begin() + static_cast<std::ptrdiff_t>(index));
  PoisonTheDead();
  const int scripted = node->task ? FaultScript::Get().Enter("execute") : 0;
  if (scripted != 0) w.sticky = static_cast<cudaError_t>(scripted);
  if (w.sticky == cudaSuccess && !Reaches(*node)) {
    std::fprintf(stderr, "fake_cudart: device %d has no access to its peer's memory\n",
                 node->device);
    w.sticky = cudaErrorIllegalAddress;
  }
  if (node->task && w.sticky == cudaSuccess) node->task();
  ++w.clock;
  node->done = true;
  node->after.clear();
}

// Whether something ran. A few candidates are enough for disorder.
bool RunSome() {
  constexpr size_t kCandidates = 16;
  World& w = W();
  std::vector<size_t> ready;
  for (size_t i = 0; i < w.pending.size() && ready.size() < kCandidates; ++i) {
    if (Ready(*w.pending[i])) ready.push_back(i);
  }
  if (ready.empty()) return false;
  Run(ready[w.random() % ready.size()]);
  return true;
}

template <typename Done>
void RunWhile(std::unique_lock<std::mutex>& lock, const Done& done) {
  World& w = W();
  while (!done()) {
    if (RunSome()) continue;
    if (std::none_of(w.pending.begin(), w.pending.end(),
                     [](const NodePtr& n) { return static_cast<bool>(n->ready); })) {
      std::fprintf(stderr, "fake_cudart: operations that wait for each other\n");
      std::abort();
    }
    w.progress.wait_for(lock, std::chrono::milliseconds(1));
  }
}

}  // namespace

void RunOne() { (void)RunSome(); }

void RunUntil(std::unique_lock<std::mutex>& lock, const NodePtr& target) {
  ++W().counters.waits;
  RunWhile(lock, [&] { return target == nullptr || target->done; });
}

void RunAll(std::unique_lock<std::mutex>& lock, int device) {
  ++W().counters.waits;
  RunWhile(lock, [device] {
    const std::vector<NodePtr>& pending = W().pending;
    return std::none_of(pending.begin(), pending.end(),
                        [&](const NodePtr& n) { return n->device == device; });
  });
}

}  // namespace dmuon_fakes

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

extern "C" {

FakeCudaCounters fake_cuda_counters() {
  std::lock_guard lock(W().mutex);
  FakeCudaCounters counters = W().counters;
  counters.streams = W().streams.size();
  counters.events = W().events.size();
  counters.graphs = W().executables.size();
  for (const auto& [base, memory] : W().memory) {
    if (memory.kind == Memory::Kind::kImported) ++counters.imports;
  }
  for (const Device& device : W().devices) counters.live_bytes += device.bytes.live;
  return counters;
}

uint64_t fake_cuda_calls(const char* function) { return FaultScript::Get().Calls(function); }
void fake_cuda_script(const char* script) { FaultScript::Get().Add(script); }
void fake_cuda_fail(const char* function, int nth, cudaError_t error) {
  FaultScript::Get().Fail(function, static_cast<uint64_t>(nth), nth == 0 ? 0 : error);
}
int fake_cuda_enter(const char* function) { return FaultScript::Get().Enter(function); }

void fake_cuda_instant(int on) {
  std::unique_lock lock(W().mutex);
  for (size_t device = 0; device < W().devices.size(); ++device)
    RunAll(lock, static_cast<int>(device));
  W().instant = on != 0;
}

bool fake_cuda_enqueue(cudaStream_t stream, const Task& operation) {
  std::lock_guard lock(W().mutex);
  CUstream_st* real = Real(stream);
  if (real == nullptr) return false;
  ++W().counters.launches;
  Enqueue(real, W().instant && real->capture == nullptr ? Task() : operation);
  return true;
}

bool fake_cuda_enqueue_when(cudaStream_t stream, const std::function<bool()>& ready,
                            const Task& operation) {
  std::lock_guard lock(W().mutex);
  CUstream_st* real = Real(stream);
  if (real == nullptr) return false;
  Enqueue(real, operation).ready = ready;
  return true;
}

void fake_cuda_step() {
  std::lock_guard lock(W().mutex);
  RunOne();
}

void fake_cuda_notify() { W().progress.notify_all(); }

int fake_cuda_stream_device(cudaStream_t stream) {
  std::lock_guard lock(W().mutex);
  if (stream == nullptr) return t_device;
  return W().streams.count(stream) > 0 ? stream->device : -1;
}

bool fake_cuda_owns(const void* memory, size_t bytes) {
  std::lock_guard lock(W().mutex);
  return OnDevice(memory, bytes);
}

bool fake_cuda_imported(const void* memory) {
  std::lock_guard lock(W().mutex);
  const auto at = Find(memory);
  return at != W().memory.end() && at->second.kind == Memory::Kind::kImported;
}

}  // extern "C"
