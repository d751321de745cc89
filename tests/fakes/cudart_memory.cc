// Memory, copies, and what is known about an address.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fakes/cudart_world.h"

namespace dmuon_fakes {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;
constexpr size_t kLarge = 2 << 20;  // from here on the device aligns to it
constexpr size_t kPoisoned =
    1 << 20;  // at either end of what is much larger: a workspace, of which little is read

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

bool AnyMemory() {
  static const bool any = std::getenv("DMUON_FAKE_ANY_MEMORY") != nullptr;
  return any;
}

bool IsDevice(Memory::Kind kind) { return kind != Memory::Kind::kHost; }

// Where memory of this kind is counted, made while `device` was current.
FakeCudaBytes& CountOf(Memory::Kind kind, int device) {
  return IsDevice(kind) ? W().devices[static_cast<size_t>(device)].bytes : W().page_locked;
}

// Device memory is a file without a name, which another process of this user can open; its first page is the header.
bool MakeShared(Memory& memory, size_t pages) {
  memory.fd = memfd_create("dmuon_fake_gpu", MFD_CLOEXEC);
  if (memory.fd < 0 || ftruncate(memory.fd, static_cast<off_t>(kPage + pages)) != 0) return false;
  void* header = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
  if (header == MAP_FAILED) return false;
  memory.header = static_cast<SharedHeader*>(header);
  return true;
}

}  // namespace

// Maps `pages` bytes and a page behind them that cannot be touched, of the file behind `fd` or of no file.
static bool MapWithGuard(Memory& memory, size_t pages, bool large) {
  const size_t slack = large ? kLarge : 0;
  memory.mapped = pages + kPage + slack;
  void* reserved = mmap(nullptr, memory.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return false;
  memory.mapping = static_cast<char*>(reserved);
  char* at = large ? reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(reserved), kLarge))
                   : memory.mapping;
  const bool file = memory.fd >= 0;
  return mmap(at, pages, PROT_READ | PROT_WRITE,
              MAP_FIXED | (file ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS), memory.fd,
              file ? static_cast<off_t>(kPage) : 0) != MAP_FAILED;
}

static char* First(const Memory& memory, size_t pages, bool large) {
  char* at =
      large ? reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(memory.mapping), kLarge))
            : memory.mapping;
  return at + pages - memory.bytes;
}

char* MapFile(Memory& memory, size_t bytes) {
  memory.bytes = bytes;
  const size_t pages = RoundUp(bytes, kPage);
  const bool large = bytes >= kLarge && bytes % kPage == 0;
  return MapWithGuard(memory, pages, large) ? First(memory, pages, large) : nullptr;
}

static cudaError_t Make(void** result, size_t bytes, Memory::Kind kind) {
  World& w = W();
  if (bytes == 0) return *result = nullptr, cudaSuccess;
  Memory memory;
  memory.kind = kind;
  memory.device = t_device;
  memory.id = w.next_id++;
  const size_t rounded = RoundUp(bytes, kAlignment);
  FakeCudaBytes& count = CountOf(kind, t_device);
  if (bytes > DeviceMemory() || (IsDevice(kind) && count.live + rounded > DeviceMemory()))
    return cudaErrorMemoryAllocation;
  if (IsDevice(kind) && !MakeShared(memory, RoundUp(rounded, kPage))) {
    if (memory.fd >= 0) close(memory.fd);
    return cudaErrorMemoryAllocation;
  }
  char* first = MapFile(memory, rounded);
  if (first == nullptr) return cudaErrorMemoryAllocation;
  if (rounded <= 8 * kPoisoned) {
    std::memset(first, 0xff, rounded);
  } else {
    std::memset(first, 0xff, kPoisoned);
    std::memset(first + rounded - kPoisoned, 0xff, kPoisoned);
  }
  count.live += rounded;
  count.most = std::max(count.most, count.live);
  ++w.counters.allocations;
  w.memory[first] = memory;
  *result = first;
  return cudaSuccess;
}

MemoryMap::iterator Find(const void* memory) {
  MemoryMap& all = W().memory;
  auto at = all.upper_bound(static_cast<char*>(const_cast<void*>(memory)));
  if (at == all.begin()) return all.end();
  --at;
  return static_cast<const char*>(memory) < at->first + at->second.bytes ? at : all.end();
}

static bool Inside(const void* memory, size_t bytes, bool device) {
  const auto at = Find(memory);
  return at != W().memory.end() && IsDevice(at->second.kind) == device &&
         static_cast<const char*>(memory) + bytes <= at->first + at->second.bytes;
}

bool OnDevice(const void* memory, size_t bytes) {
  return AnyMemory() || Inside(memory, bytes, true);
}
bool InHostMemory(const void* memory, size_t bytes) { return Inside(memory, bytes, false); }

void RefusePending(const char* doing, const char* begin, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  for (const NodePtr& node : W().pending) {
    for (const uintptr_t word : node->words) {
      if (word < first || word >= first + bytes) continue;
      std::fprintf(stderr, "fake_cudart: %s of memory that a waiting operation touches\n", doing);
      std::abort();
    }
  }
}

void Release(MemoryMap::iterator at) {
  World& w = W();
  const Memory memory = at->second;
  munmap(memory.mapping, memory.mapped);
  if (memory.header != nullptr) munmap(memory.header, kPage);
  if (memory.fd >= 0) close(memory.fd);
  if (memory.exporter_pidfd >= 0) close(memory.exporter_pidfd);
  if (memory.kind != Memory::Kind::kImported) {
    CountOf(memory.kind, memory.device).live -= memory.bytes;
    ++w.counters.frees;
  }
  w.memory.erase(at);
}

// Freeing what another process has open is the one mistake that nothing reports on real hardware.
static void RefuseImported(const Memory& memory) {
  for (const SharedHeader::Importer& importer : memory.header->importers) {
    if (importer.mappings == 0 || StartTicks(importer.pid) != importer.start_ticks) continue;
    std::fprintf(stderr, "fake_cudart: cudaFree of memory that process %d has open\n",
                 importer.pid);
    std::abort();
  }
}

static cudaError_t Free(void* memory, bool device) {
  if (memory == nullptr) return cudaSuccess;
  const auto at = W().memory.find(static_cast<char*>(memory));
  if (at == W().memory.end() || at->second.kind == Memory::Kind::kImported ||
      IsDevice(at->second.kind) != device) {
    return cudaErrorInvalidValue;
  }
  RefusePending("freeing", at->first, at->second.bytes);
  if (device) {
    RefuseImported(at->second);
    at->second.header->freed = true;
  }
  Release(at);
  return cudaSuccess;
}

namespace {

// The device to wait for before memory goes.
int Home(const void* memory) {
  const auto at = Find(memory);
  return at != W().memory.end() ? at->second.device : t_device;
}

// Zeros are what a file has where nothing was written: pages that nobody touches cost nothing.
void Fill(char* to, int value, size_t bytes) {
  const auto at = Find(to);
  const auto begin = reinterpret_cast<char*>(RoundUp(reinterpret_cast<uintptr_t>(to), kPage));
  if (value != 0 || bytes < kLarge || at == W().memory.end() || at->second.fd < 0) {
    std::memset(to, value, bytes);
    return;
  }
  char* const end = begin + (to + bytes - begin) / kPage * kPage;
  const char* pages = at->first + at->second.bytes - RoundUp(at->second.bytes, kPage);
  (void)fallocate(at->second.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(kPage) + (begin - pages), end - begin);
  std::memset(to, 0, static_cast<size_t>(begin - to));
  std::memset(end, 0, static_cast<size_t>(to + bytes - end));
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

cudaMemcpyKind Direction(const Copy& c) {
  const bool to = OnDevice(c.to, c.bytes), from = OnDevice(c.from, c.bytes);
  return to ? (from ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
            : (from ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
}

cudaError_t EnqueueCopy(Call& call, const Copy& c, cudaMemcpyKind kind, CUstream_st* stream) {
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (kind == cudaMemcpyDefault) kind = Direction(c);
  if (!AnyMemory() && kind != Direction(c)) return cudaErrorInvalidValue;
  const bool pinned = InHostMemory(kind == cudaMemcpyHostToDevice ? c.from : c.to, c.bytes);
  const std::vector<uintptr_t> words = {reinterpret_cast<uintptr_t>(c.to),
                                        reinterpret_cast<uintptr_t>(c.from)};
  const Task copy = [c] { std::memcpy(c.to, c.from, c.bytes); };
  if (kind == cudaMemcpyHostToDevice && !pinned) {
    // Pageable memory is read before the call returns; page-locked memory when the copy runs.
    Enqueue(stream, [c, staged = std::string(static_cast<const char*>(c.from), c.bytes)] {
      std::memcpy(c.to, staged.data(), staged.size());
    }).words = {words[0]};
    return cudaSuccess;
  }
  Node& node = Enqueue(stream, copy);
  node.words = words;
  node.copies = true;
  if (kind == cudaMemcpyDeviceToHost && !pinned && stream->capture == nullptr)
    RunUntil(call.lock(), stream->last);
  return W().sticky;
}

}  // namespace
}  // namespace dmuon_fakes

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

extern "C" {

FakeCudaBytes fake_cuda_bytes(int device) {
  std::lock_guard lock(W().mutex);
  return CountOf(device < 0 ? Memory::Kind::kHost : Memory::Kind::kDevice, device);
}
void fake_cuda_forget_most() {
  std::lock_guard lock(W().mutex);
  for (Device& device : W().devices) device.bytes.most = device.bytes.live;
  W().page_locked.most = W().page_locked.live;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  ENTER("cudaMalloc");
  const bool replaced = std::getenv("DMUON_FAKE_CUDA_MALLOC") != nullptr;
  return Answer(Make(memory, bytes, replaced ? Memory::Kind::kPool : Memory::Kind::kDevice));
}
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  ENTER("cudaMallocAsync");
  return Answer(Make(memory, bytes, Memory::Kind::kPool));
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  ENTER("cudaFreeAsync");
  RunAll(call.lock(), Home(memory));
  return Answer(Free(memory, true));
}
cudaError_t cudaFree(void* memory) {
  ENTER("cudaFree");
  if (memory == nullptr) return cudaSuccess;
  RunAll(call.lock(), Home(memory));
  return Answer(Free(memory, true));
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  ENTER("cudaHostAlloc");
  return Answer(Make(memory, bytes, Memory::Kind::kHost));
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  ENTER("cudaMallocHost");
  return Answer(Make(memory, bytes, Memory::Kind::kHost));
}
cudaError_t cudaFreeHost(void* memory) {
  ENTER("cudaFreeHost");
  RunAll(call.lock(), Home(memory));
  return Answer(Free(memory, false));
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER("cudaMemGetInfo");
  *total = DeviceMemory();
  *free = *total - DeviceOf(t_device)->bytes.live;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ENTER("cudaMemcpyAsync");
  return Answer(EnqueueCopy(call, {to, from, bytes}, kind, Real(stream)));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                size_t bytes, cudaStream_t stream) {
  ENTER("cudaMemcpyPeerAsync");
  if (DeviceOf(to_device) == nullptr || DeviceOf(from_device) == nullptr)
    return Answer(cudaErrorInvalidDevice);
  return Answer(EnqueueCopy(call, {to, from, bytes}, cudaMemcpyDeviceToDevice, Real(stream)));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  ENTER("cudaMemcpy");
  CUstream_st* stream = Real(nullptr);
  const cudaError_t error = EnqueueCopy(call, {to, from, bytes}, kind, stream);
  if (error == cudaSuccess) RunUntil(call.lock(), stream->last);
  return Answer(error != cudaSuccess ? error : W().sticky);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  ENTER("cudaMemsetAsync");
  CUstream_st* real = Real(stream);
  if (real == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  if (!OnDevice(to, bytes)) return Answer(cudaErrorInvalidValue);
  Enqueue(real, [=] { Fill(static_cast<char*>(to), value, bytes); },
          {reinterpret_cast<uintptr_t>(to)});
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t error = cudaMemsetAsync(to, value, bytes, nullptr);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  ENTER("cudaPointerGetAttributes");
  *attributes = {};
  const auto at = Find(pointer);
  attributes->device = -2;  // as the runtime says of what it does not know
  if (at == W().memory.end()) return cudaSuccess;
  void* address = const_cast<void*>(pointer);
  const bool device = IsDevice(at->second.kind);
  attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = at->second.device;
  attributes->devicePointer = address;
  attributes->hostPointer = device ? nullptr : address;
  return cudaSuccess;
}

// ---- the driver's, by cudaGetDriverEntryPointByVersion

CUresult fake_cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  if (FaultScript::Get().Enter("cuMemGetAddressRange") != 0) return CUDA_ERROR_UNKNOWN;
  std::lock_guard lock(W().mutex);
  const auto at = Find(reinterpret_cast<const void*>(pointer));
  if (at == W().memory.end()) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(at->first);
  if (bytes != nullptr) *bytes = at->second.bytes;
  return CUDA_SUCCESS;
}
CUresult fake_cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                    CUdeviceptr pointer) {
  if (FaultScript::Get().Enter("cuPointerGetAttribute") != 0) return CUDA_ERROR_UNKNOWN;
  std::lock_guard lock(W().mutex);
  const auto at = Find(reinterpret_cast<const void*>(pointer));
  if (at == W().memory.end()) return CUDA_ERROR_INVALID_VALUE;
  const Memory& memory = at->second;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) =
          IsDevice(memory.kind) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *static_cast<unsigned long long*>(data) = memory.id; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(data) = memory.device; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(data) = memory.kind == Memory::Kind::kDevice ? 1 : 0;
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<void**>(data) = at->first; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t*>(data) = memory.bytes; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  ENTER_ANYHOW("cudaGetDriverEntryPointByVersion");
  const std::string name = symbol;
  *function = name == "cuMemGetAddressRange" ? reinterpret_cast<void*>(&fake_cuMemGetAddressRange)
              : name == "cuPointerGetAttribute"
                  ? reinterpret_cast<void*>(&fake_cuPointerGetAttribute)
                  : nullptr;
  if (result != nullptr)
    *result =
        *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 13000, flags, result);
}

}  // extern "C"
