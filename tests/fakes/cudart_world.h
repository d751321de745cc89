// The state of the stand-in for libcudart.so.13, shared by its files. Not for tests: they see fake_cudart.h.
#ifndef DMUON_TESTS_FAKES_CUDART_WORLD_H_
#define DMUON_TESTS_FAKES_CUDART_WORLD_H_

#include <sys/types.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/fakes/fake_cudart.h"
#include "tests/fakes/fault_script.h"

namespace dmuon_fakes {

using Task = std::function<void()>;

// One operation of the device. It may run when all of `after` have and `ready`, if any, says so.
struct Node {
  Task task;
  std::vector<std::shared_ptr<Node>> after;
  std::function<bool()> ready;
  std::vector<uintptr_t> words;  // what may be an address among its arguments
  int device = 0;
  bool copies = false;  // by an engine, which reaches every device
  bool done = false;
};
using NodePtr = std::shared_ptr<Node>;

struct Capture;

// What an exporter and its importers share: the first page of each allocation's memfd.
struct SharedHeader {
  static constexpr size_t kMostImporters = 64;
  struct Importer {
    pid_t pid;
    uint64_t start_ticks;
    uint64_t mappings;
  };
  Importer importers[kMostImporters];
  bool freed;
};

struct Memory {
  enum class Kind { kDevice, kPool, kImported, kHost };
  Kind kind = Kind::kDevice;
  int device = 0;  // ordinal in this process; of host memory: the one that was current
  char* mapping = nullptr;
  size_t mapped = 0;
  size_t bytes = 0;
  uint64_t id = 0;
  int fd = -1;
  SharedHeader* header = nullptr;
  // Of an import.
  int opened_on = 0;
  int count = 0;
  int exporter_pidfd = -1;
  bool poisoned = false;
  std::string handle;
};
using MemoryMap = std::map<char*, Memory>;

struct Device {
  std::string name;
  unsigned char uuid[16] = {};
  int physical = 0;
  bool mig = false;
  bool context = false;
  FakeCudaBytes bytes = {};
  std::set<int> peers;  // ordinals whose memory its kernels may touch
};

struct KernelEntry {
  std::string name;
  uint64_t launches = 0;
  bool loaded = false;
};

struct World {
  bool instant = false;
  std::mutex mutex;
  std::condition_variable progress;
  std::vector<NodePtr> pending;
  MemoryMap memory;
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::set<CUgraph_st*> graphs;
  std::set<CUgraphExec_st*> executables;
  std::vector<Device> devices;
  std::mt19937 random;
  FakeCudaCounters counters = {};
  FakeCudaBytes page_locked = {};
  double clock = 0;  // what events read: each operation takes a millisecond
  cudaError_t sticky = cudaSuccess;
  pid_t pid = 0;
  uint64_t next_id = 1;
  std::map<int, std::unique_ptr<CUstream_st>> default_streams;
};

// Made on first use: kernels register themselves before main, in an order that nobody states.
World& W();

extern thread_local cudaError_t t_last;
extern thread_local int t_device;

// One call of the library: counts it, does what the fault script says, then holds the lock. What a call answers goes through
// Answer, for cudaGetLastError.
class Call {
 public:
  enum class Needs { kNothing, kContext };
  explicit Call(const char* function, Needs needs = Needs::kContext);
  bool failed() const { return error_ != cudaSuccess; }
  cudaError_t error() const { return error_; }
  std::unique_lock<std::mutex>& lock() { return lock_; }

 private:
  cudaError_t error_ = cudaSuccess;
  std::unique_lock<std::mutex> lock_;
};

cudaError_t Answer(cudaError_t error);

#define ENTER(function)               \
  ::dmuon_fakes::Call call(function); \
  if (call.failed()) return call.error()
#define ENTER_ANYHOW(function)                                              \
  ::dmuon_fakes::Call call(function, ::dmuon_fakes::Call::Needs::kNothing); \
  if (call.failed()) return call.error()

// ---- all of these: REQUIRES the lock

// The device's context, made on first use. DevicesUnavailable: another process holds the device exclusively.
cudaError_t MakeContext(int device);
const Device* DeviceOf(int ordinal);
bool CanAccessPeer(int device, int peer);
size_t DeviceMemory();  // that this process may have of each device

// The stream itself, or null: destroyed or never made.
CUstream_st* Real(cudaStream_t stream);
Node& Enqueue(CUstream_st* stream, Task task, std::vector<uintptr_t> words = {});
// Runs operations, in any order that is allowed, until `target` is done. Lets the lock go where only another process or
// thread can help.
void RunUntil(std::unique_lock<std::mutex>& lock, const NodePtr& target);
// The same for all that waits on a device.
void RunAll(std::unique_lock<std::mutex>& lock, int device);
void RunOne();

MemoryMap::iterator Find(const void* memory);
bool OnDevice(const void* memory, size_t bytes);
bool InHostMemory(const void* memory, size_t bytes);
// Ends the process when an operation that has not run may touch [begin, begin + bytes).
void RefusePending(const char* doing, const char* begin, size_t bytes);
// Memory whose exporter is dead becomes NaN: what the driver would leave there, nobody knows.
void PoisonTheDead();
void Release(MemoryMap::iterator at);
// Maps `bytes` of memory.fd behind its header, or of no file; null: no room.
char* MapFile(Memory& memory, size_t bytes);
std::string LeakReport();
// `text` into a caller's buffer of `bytes`, cut to fit with its end; its full length.
size_t CopyOut(const std::string& text, char* to, size_t bytes);

uint64_t StartTicks(pid_t pid);

}  // namespace dmuon_fakes

struct CUstream_st {
  dmuon_fakes::NodePtr last;
  dmuon_fakes::Capture* capture = nullptr;
  int device = 0;
  int priority = 0;
};

struct CUevent_st {
  dmuon_fakes::NodePtr node;  // null: never recorded, counts as done
  dmuon_fakes::Capture* capture = nullptr;
  std::shared_ptr<double> milliseconds = std::make_shared<double>(0);
  unsigned flags = 0;
  int device = 0;
};

struct CUgraph_st {
  std::vector<dmuon_fakes::NodePtr>
      nodes;  // in the order of recording, so each after those it needs
};

struct CUgraphExec_st {
  std::vector<dmuon_fakes::NodePtr> nodes;
  bool uploaded = false;
};

namespace dmuon_fakes {

struct Capture {
  CUgraph_st* graph = nullptr;
  CUstream_st* origin = nullptr;
  std::set<CUstream_st*> streams;
};

}  // namespace dmuon_fakes

#endif  // DMUON_TESTS_FAKES_CUDART_WORLD_H_
