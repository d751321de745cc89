// Memory of one process in another.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fakes/cudart_world.h"

namespace dmuon_fakes {
namespace {

constexpr size_t kPage = 4096;
constexpr char kMagic[8] = {'f', 'a', 'k', 'e', 'i', 'p', 'c', '1'};

struct Handle {
  char magic[8];
  pid_t pid;
  int fd;
  uint64_t start_ticks;
  uint64_t bytes;
  uint64_t id;
  unsigned char uuid[16];
  uint32_t ipc_namespace;
  bool mig;
};
static_assert(sizeof(Handle) <= CUDA_IPC_HANDLE_SIZE);

uint32_t IpcNamespace() {
  struct stat found = {};
  (void)stat("/proc/self/ns/ipc", &found);
  return static_cast<uint32_t>(found.st_ino);
}

bool CanShare() {
  const char* mode = std::getenv("DMUON_FAKE_CUDA_IPC");
  return mode == nullptr || std::strcmp(mode, "none") != 0;
}

int PidFd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

// The ordinal here of the device that the exporter's memory is on; -1: not visible.
int Home(const Handle& handle) {
  for (int i = 0; DeviceOf(i) != nullptr; ++i) {
    if (std::memcmp(DeviceOf(i)->uuid, handle.uuid, sizeof(handle.uuid)) == 0) return i;
  }
  return -1;
}

SharedHeader::Importer* Seat(SharedHeader& header) {
  const uint64_t ticks = StartTicks(getpid());
  SharedHeader::Importer* free = nullptr;
  for (SharedHeader::Importer& importer : header.importers) {
    if (importer.pid == getpid() && importer.start_ticks == ticks) return &importer;
    const bool gone = importer.pid == 0 || importer.mappings == 0 ||
                      StartTicks(importer.pid) != importer.start_ticks;
    if (free == nullptr && gone) free = &importer;
  }
  if (free != nullptr) *free = {getpid(), ticks, 0};
  return free;
}

cudaError_t Open(const Handle& handle, const std::string& key, void** result) {
  World& w = W();
  Memory memory;
  memory.kind = Memory::Kind::kImported;
  memory.exporter_pidfd = PidFd(handle.pid);
  if (memory.exporter_pidfd < 0 || StartTicks(handle.pid) != handle.start_ticks) {
    if (memory.exporter_pidfd >= 0) close(memory.exporter_pidfd);
    return cudaErrorInvalidResourceHandle;  // the exporter is dead
  }
  const std::string path =
      "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  memory.fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat file = {};
  void* header = MAP_FAILED;
  if (memory.fd >= 0 && fstat(memory.fd, &file) == 0 &&
      static_cast<uint64_t>(file.st_size) >= kPage + handle.bytes) {
    header = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
  }
  if (header == MAP_FAILED || static_cast<SharedHeader*>(header)->freed) {
    if (memory.fd >= 0) close(memory.fd);
    close(memory.exporter_pidfd);
    return memory.fd < 0 ? cudaErrorMapBufferObjectFailed : cudaErrorInvalidResourceHandle;
  }
  memory.header = static_cast<SharedHeader*>(header);
  const int home = Home(handle);
  memory.device = home >= 0 ? home : t_device;
  memory.opened_on = t_device;
  memory.count = 1;
  memory.id = w.next_id++;
  memory.handle = key;
  char* first = MapFile(memory, handle.bytes);
  SharedHeader::Importer* seat = Seat(*memory.header);
  if (first == nullptr || seat == nullptr) return cudaErrorMapBufferObjectFailed;
  ++seat->mappings;
  // Opening makes the peer's memory reachable, as the flag asks.
  if (home >= 0 && home != t_device) w.devices[static_cast<size_t>(t_device)].peers.insert(home);
  w.memory[first] = memory;
  ++w.counters.imports_opened;
  *result = first;
  return cudaSuccess;
}

}  // namespace

uint64_t StartTicks(pid_t pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  const ssize_t length = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (length <= 0) return 0;
  text[length] = 0;
  const char* at = std::strrchr(text, ')');  // a name may hold anything
  if (at == nullptr || at[2] == 'Z' || at[2] == 'X') return 0;
  for (int field = 2; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
  return at != nullptr ? std::strtoull(at, nullptr, 10) : 0;
}

void PoisonTheDead() {
  for (auto& [first, memory] : W().memory) {
    if (memory.kind != Memory::Kind::kImported || memory.poisoned) continue;
    pollfd dead = {memory.exporter_pidfd, POLLIN, 0};
    if (poll(&dead, 1, 0) != 1) continue;
    std::memset(first, 0xff, memory.bytes);
    memory.poisoned = true;
  }
}

}  // namespace dmuon_fakes

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

extern "C" {

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  ENTER("cudaIpcGetMemHandle");
  if (!CanShare()) return Answer(cudaErrorNotSupported);
  const auto at = Find(pointer);
  // Memory of a pool is not for this kind of handle, and another process's is not ours to give.
  if (at == W().memory.end() || at->second.kind != Memory::Kind::kDevice)
    return Answer(cudaErrorInvalidValue);
  const Memory& memory = at->second;
  Handle made = {};
  std::memcpy(made.magic, kMagic, sizeof(kMagic));
  made.pid = getpid();
  made.fd = memory.fd;
  made.start_ticks = StartTicks(getpid());
  made.bytes = memory.bytes;
  made.id = memory.id;
  std::memcpy(made.uuid, DeviceOf(memory.device)->uuid, sizeof(made.uuid));
  made.ipc_namespace = IpcNamespace();
  made.mig = DeviceOf(memory.device)->mig;
  *handle = {};
  std::memcpy(handle, &made, sizeof(made));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t raw, unsigned flags) {
  ENTER("cudaIpcOpenMemHandle");
  Handle handle;
  std::memcpy(&handle, &raw, sizeof(handle));
  if (!CanShare()) return Answer(cudaErrorNotSupported);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return Answer(cudaErrorInvalidValue);
  if (std::memcmp(handle.magic, kMagic, sizeof(kMagic)) != 0)
    return Answer(cudaErrorInvalidResourceHandle);
  // The driver, too, goes by the number: two processes of two pid namespaces can look like one.
  if (handle.pid == getpid()) return Answer(cudaErrorDeviceUninitialized);
  const std::string key(reinterpret_cast<const char*>(&handle), sizeof(handle));
  for (auto& [first, memory] : W().memory) {
    if (memory.kind == Memory::Kind::kImported && memory.handle == key &&
        memory.opened_on == t_device) {
      ++memory.count;
      *pointer = first;
      return cudaSuccess;
    }
  }
  // Nobody says which error it is in a container of its own; this is one of those that are documented.
  if (handle.ipc_namespace != IpcNamespace()) return Answer(cudaErrorMapBufferObjectFailed);
  const int home = Home(handle);
  if (handle.mig && home != t_device) return Answer(cudaErrorInvalidResourceHandle);
  if (home >= 0 && home != t_device && !CanAccessPeer(t_device, home))
    return Answer(cudaErrorPeerAccessUnsupported);
  return Answer(Open(handle, key, pointer));
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  ENTER("cudaIpcCloseMemHandle");
  const auto at = W().memory.find(static_cast<char*>(pointer));
  if (at == W().memory.end() || at->second.kind != Memory::Kind::kImported)
    return Answer(cudaErrorInvalidValue);
  if (at->second.opened_on != t_device) return Answer(cudaErrorInvalidResourceHandle);
  if (--at->second.count > 0) return cudaSuccess;
  RefusePending("closing", at->first, at->second.bytes);
  if (SharedHeader::Importer* seat = Seat(*at->second.header); seat != nullptr) --seat->mappings;
  ++W().counters.imports_closed;
  Release(at);
  return cudaSuccess;
}

}  // extern "C"
