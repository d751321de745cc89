#include "tests/fakes/fake_nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fakes/fake_cudart.h"
#include "tests/fakes/nccl_wire.h"

using namespace dmuon_fakes;  // NOLINT: the C interface of what is there

// Shared by the handle, the operations that wait on streams, and the threads that talk to the hub.
struct ncclComm {
  int rank = 0, ranks = 0, device = 0;
  bool blocking = true;
  int fd = -1;
  std::mutex mutex;
  std::condition_variable changed;
  ncclResult_t state = ncclInProgress;
  int polls = 0;  // that a call of a non-blocking communicator stays in progress
  std::atomic<bool> aborted{false};
  bool finalizing = false;
  uint64_t sequence = 0, outstanding = 0;
  std::map<uint64_t, std::vector<char>> results;
  std::deque<std::pair<Frame, std::vector<char>>> outbox;
  std::thread reader, writer;
};

namespace {

using Comm = std::shared_ptr<ncclComm>;

struct Call {
  Comm comm;
  Frame frame;
  const void* from;
  void* to;
  size_t from_bytes, to_bytes;
  cudaStream_t stream;
};

struct Group {
  int depth = 0;
  std::vector<Call> calls;
  std::vector<Comm> blocking_inits;
};
thread_local Group t_group;

std::mutex g_mutex;
std::map<ncclComm_t, Comm>& Comms() {
  static auto* const comms = new std::map<ncclComm_t, Comm>();
  return *comms;
}

Comm Find(ncclComm_t comm) {
  std::lock_guard lock(g_mutex);
  const auto found = Comms().find(comm);
  return found != Comms().end() ? found->second : nullptr;
}

ncclResult_t Refuse(const char* why) {
  std::fprintf(stderr, "fake_nccl: %s\n", why);
  return ncclInvalidUsage;
}

#define ENTER(function)                                        \
  if (int scripted = fake_cuda_enter(function); scripted != 0) \
  return static_cast<ncclResult_t>(scripted)

size_t Width(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclFloat32:
    case ncclInt32:
    case ncclUint32: return 4;
    case ncclFloat64:
    case ncclInt64:
    case ncclUint64: return 8;
    default: return 1;
  }
}

void SetState(ncclComm& comm, ncclResult_t state) {
  {
    std::lock_guard lock(comm.mutex);
    comm.state = state;
  }
  comm.changed.notify_all();
}

void Post(ncclComm& comm, const Frame& frame, std::vector<char> payload) {
  {
    std::lock_guard lock(comm.mutex);
    comm.outbox.emplace_back(frame, std::move(payload));
  }
  comm.changed.notify_all();
}

void ReadFromHub(const Comm& comm) {
  Frame frame;
  std::vector<char> payload;
  while (Read(comm->fd, frame, payload)) {
    if (frame.kind == Frame::Kind::kReady) {
      if (frame.error != ncclSuccess) {
        SetState(*comm, static_cast<ncclResult_t>(frame.error));
      } else if (fake_cuda_enter("ncclInitHang") == 0) {
        SetState(*comm, ncclSuccess);
      }
    } else {
      std::lock_guard lock(comm->mutex);
      comm->results[frame.sequence] = payload;
    }
    fake_cuda_notify();
  }
  // The hub's process is gone: what NCCL calls a remote error.
  std::lock_guard lock(comm->mutex);
  if (!comm->aborted) comm->state = ncclRemoteError;
  comm->changed.notify_all();
}

void WriteToHub(const Comm& comm) {
  std::unique_lock lock(comm->mutex);
  while (true) {
    comm->changed.wait(lock, [&] { return comm->aborted || !comm->outbox.empty(); });
    if (comm->aborted) return;
    const auto [frame, payload] = std::move(comm->outbox.front());
    comm->outbox.pop_front();
    lock.unlock();
    (void)Write(comm->fd, frame, payload);
    lock.lock();
  }
}

// A device works on without being asked. While any communicator is there, so does the stand-in, a little at a time.
void StartDevice() {
  static const bool started = [] {
    std::thread([] {
      std::mutex mutex;
      std::condition_variable never;
      std::unique_lock lock(mutex);
      while (true) {
        never.wait_for(lock, std::chrono::milliseconds(1), [] { return false; });
        fake_cuda_step();
      }
    }).detach();
    return true;
  }();
  (void)started;
}

// Two nodes on the stream: one hands the bytes to the hub, the next waits for the answer and writes it.
void Enqueue(const Call& call) {
  const bool hangs = fake_cuda_enter("ncclHang") != 0;
  const int error = fake_cuda_enter("ncclAsyncError");
  const Comm comm = call.comm;
  Frame frame = call.frame;
  {
    std::lock_guard lock(comm->mutex);
    frame.sequence = comm->sequence++;
    ++comm->outstanding;
  }
  frame.kind = Frame::Kind::kIssued;
  Post(*comm, frame, {});
  frame.kind = Frame::Kind::kData;
  (void)fake_cuda_enqueue(call.stream, [=] {
    if (error != 0) return SetState(*comm, static_cast<ncclResult_t>(error));
    if (hangs || comm->aborted) return;
    const char* from = static_cast<const char*>(call.from);
    Post(*comm, frame, std::vector<char>(from, from + (from != nullptr ? call.from_bytes : 0)));
  });
  const auto answered = [=] {
    std::lock_guard lock(comm->mutex);
    return comm->aborted || comm->results.count(frame.sequence) > 0;
  };
  (void)fake_cuda_enqueue_when(call.stream, answered, [=] {
    std::lock_guard lock(comm->mutex);
    --comm->outstanding;
    if (comm->aborted) return;
    const std::vector<char>& result = comm->results[frame.sequence];
    if (!result.empty())
      std::memcpy(call.to, result.data(), std::min(result.size(), call.to_bytes));
    comm->results.erase(frame.sequence);
  });
}

// Whether a communicator takes a call now.
ncclResult_t Usable(const Comm& comm) {
  if (comm == nullptr) return ncclInvalidArgument;
  std::lock_guard lock(comm->mutex);
  if (comm->state == ncclInProgress || comm->polls > 0)
    return Refuse("a call while the last one is in progress");
  if (comm->finalizing) return Refuse("a call after ncclCommFinalize");
  return comm->state;
}

ncclResult_t Issue(const std::vector<Call>& calls) {
  static std::atomic<int> turn{0};
  bool in_progress = false;
  for (const Call& call : calls) Enqueue(call);
  for (const Call& call : calls) {
    if (call.comm->blocking) continue;
    std::lock_guard lock(call.comm->mutex);
    call.comm->polls = 1 + turn++ % 3;
    in_progress = true;
  }
  return in_progress ? ncclInProgress : ncclSuccess;
}

ncclResult_t Submit(const Call& call) {
  if (const ncclResult_t usable = Usable(call.comm); usable != ncclSuccess) return usable;
  const ncclComm& comm = *call.comm;
  if (fake_cuda_stream_device(call.stream) != comm.device)
    return Refuse("a stream of another device");
  for (const auto& [memory, bytes] : {std::pair<const void*, size_t>(call.from, call.from_bytes),
                                      std::pair<const void*, size_t>(call.to, call.to_bytes)}) {
    if (memory == nullptr) continue;
    if (!fake_cuda_owns(memory, bytes)) return Refuse("memory that is not the device's");
    if (fake_cuda_imported(memory)) return Refuse("memory of another process");
  }
  if (call.frame.root < 0 || call.frame.root >= comm.ranks) return ncclInvalidArgument;
  if (t_group.depth == 0) return Issue({call});
  t_group.calls.push_back(call);
  return ncclSuccess;
}

Call Collective(Op op, const void* from, void* to, size_t count, ncclDataType_t type,
                ncclComm_t comm, cudaStream_t stream) {
  Call call = {};
  call.comm = Find(comm);
  call.frame.op = op;
  call.frame.count = count;
  call.frame.type = type;
  call.frame.rank = call.comm != nullptr ? call.comm->rank : 0;
  call.from = from;
  call.to = to;
  call.from_bytes = call.to_bytes = count * Width(type);
  call.stream = stream;
  return call;
}

ncclResult_t WaitReady(const Comm& comm) {
  std::unique_lock lock(comm->mutex);
  comm->changed.wait(lock, [&] { return comm->state != ncclInProgress; });
  return comm->state;
}

// Ends the threads and forgets the handle. What waits on a stream ends without a result.
void Close(const Comm& comm) {
  {
    std::lock_guard lock(comm->mutex);
    comm->aborted = true;
  }
  comm->changed.notify_all();
  if (comm->fd >= 0) shutdown(comm->fd, SHUT_RDWR);
  if (comm->reader.joinable()) comm->reader.join();
  if (comm->writer.joinable()) comm->writer.join();
  if (comm->fd >= 0) close(comm->fd);
  fake_cuda_notify();
  std::lock_guard lock(g_mutex);
  Comms().erase(comm.get());
}

}  // namespace

extern "C" {

size_t fake_nccl_disorder(char* text, size_t bytes) {
  const std::string found = Disorder();
  if (bytes > 0) std::snprintf(text, bytes, "%s", found.c_str());
  return found.size();
}
int fake_nccl_communicators() {
  std::lock_guard lock(g_mutex);
  return static_cast<int>(Comms().size());
}

ncclResult_t ncclGetVersion(int* version) {
  ENTER("ncclGetVersion");
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  ENTER("ncclGetUniqueId");
  const std::string name = StartHub();
  if (name.empty()) return ncclSystemError;
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "%s", name.c_str());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  ENTER("ncclCommInitRankConfig");
  if (rank < 0 || rank >= ranks) return ncclInvalidArgument;
  auto comm = std::make_shared<ncclComm>();
  comm->rank = rank;
  comm->ranks = ranks;
  comm->blocking = config == nullptr || config->blocking != 0;
  cudaDeviceProp properties;
  if (cudaGetDevice(&comm->device) != cudaSuccess ||
      cudaGetDeviceProperties(&properties, comm->device) != cudaSuccess) {
    return ncclUnhandledCudaError;
  }
  comm->fd = OpenSocket(id.internal, false);
  if (comm->fd < 0)
    return HubIsOver(id.internal) ? Refuse("a unique id that is used again") : ncclSystemError;
  StartDevice();
  {
    std::lock_guard lock(g_mutex);
    Comms()[comm.get()] = comm;
  }
  *result = comm.get();
  comm->reader = std::thread([comm] { ReadFromHub(comm); });
  comm->writer = std::thread([comm] { WriteToHub(comm); });
  Frame join;
  join.rank = rank;
  join.count = static_cast<uint64_t>(ranks);
  std::memcpy(join.uuid, properties.uuid.bytes, sizeof(join.uuid));
  Post(*comm, join, {});
  if (!comm->blocking) return ncclInProgress;
  if (t_group.depth == 0) return WaitReady(comm);
  t_group.blocking_inits.push_back(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  ENTER("ncclCommGetAsyncError");
  const Comm comm = Find(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  std::lock_guard lock(comm->mutex);
  *error = comm->state;
  if (comm->state != ncclSuccess) return ncclSuccess;
  if (comm->polls > 0) {
    --comm->polls;
    *error = ncclInProgress;
  } else if (comm->finalizing && comm->outstanding > 0) {
    *error = ncclInProgress;
  }
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t handle, int* count) {
  const Comm comm = Find(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  *count = comm->ranks;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  const Comm comm = Find(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t handle, int* device) {
  const Comm comm = Find(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  ENTER("ncclCommFinalize");
  const Comm comm = Find(handle);
  if (const ncclResult_t usable = Usable(comm); usable != ncclSuccess) return usable;
  std::lock_guard lock(comm->mutex);
  comm->finalizing = true;
  return comm->blocking ? ncclSuccess : ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  ENTER("ncclCommDestroy");
  const Comm comm = Find(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  {
    std::lock_guard lock(comm->mutex);
    if (comm->outstanding > 0)
      return Refuse("ncclCommDestroy under operations that have not ended");
  }
  Close(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  ENTER("ncclCommAbort");
  const Comm comm = Find(handle);
  if (comm == nullptr) return ncclInvalidArgument;
  Close(comm);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ENTER("ncclGroupStart");
  ++t_group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  ENTER("ncclGroupEnd");
  if (t_group.depth == 0) return ncclInvalidUsage;
  if (--t_group.depth > 0) return ncclSuccess;
  const Group group = std::exchange(t_group, {});
  for (const Comm& comm : group.blocking_inits) {
    if (const ncclResult_t ready = WaitReady(comm); ready != ncclSuccess) return ready;
  }
  return Issue(group.calls);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  ENTER("ncclAllReduce");
  Call call = Collective(Op::kAllReduce, from, to, count, type, comm, stream);
  call.frame.reduction = reduction;
  return Submit(call);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream) {
  ENTER("ncclReduce");
  Call call = Collective(Op::kReduce, from, to, count, type, comm, stream);
  call.frame.reduction = reduction;
  call.frame.root = root;
  if (call.comm != nullptr && call.comm->rank != root) call.to = nullptr;
  return Submit(call);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  ENTER("ncclBroadcast");
  Call call = Collective(Op::kBroadcast, from, to, count, type, comm, stream);
  call.frame.root = root;
  if (call.comm != nullptr && call.comm->rank != root) call.from = nullptr;
  return Submit(call);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  ENTER("ncclAllGather");
  Call call = Collective(Op::kAllGather, from, to, count, type, comm, stream);
  if (call.comm != nullptr) call.to_bytes *= static_cast<size_t>(call.comm->ranks);
  return Submit(call);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
  ENTER("ncclReduceScatter");
  Call call = Collective(Op::kReduceScatter, from, to, count, type, comm, stream);
  call.frame.reduction = reduction;
  if (call.comm != nullptr) {
    call.from_bytes *= static_cast<size_t>(call.comm->ranks);
    call.frame.count *= static_cast<size_t>(call.comm->ranks);
  }
  return Submit(call);
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  ENTER("ncclSend");
  Call call = Collective(Op::kSend, from, nullptr, count, type, comm, stream);
  call.frame.root = peer;
  return Submit(call);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  ENTER("ncclRecv");
  Call call = Collective(Op::kReceive, nullptr, to, count, type, comm, stream);
  call.frame.root = peer;
  return Submit(call);
}

}  // extern "C"
