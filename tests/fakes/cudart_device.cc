// Devices, contexts, versions and errors.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fakes/cudart_world.h"

namespace dmuon_fakes {
namespace {

constexpr size_t kDefaultMemory = size_t{4} << 30;

bool Is(const char* variable, const char* value) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::strcmp(text, value) == 0;
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> items;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    items.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

std::vector<Device> PhysicalDevices() {
  const char* text = std::getenv("DMUON_FAKE_CUDA_DEVICES");
  std::vector<std::string> kinds = Split(text != nullptr ? text : "1");
  if (kinds.size() == 1 && kinds[0].find_first_not_of("0123456789") == std::string::npos)
    kinds.assign(static_cast<size_t>(std::atoi(kinds[0].c_str())), "gpu");
  std::vector<Device> devices;
  for (const std::string& kind : kinds) {
    Device device;
    device.physical = static_cast<int>(devices.size());
    device.mig = kind == "mig";
    device.name = device.mig ? "Fake GPU MIG 1g.10gb" : "Fake GPU";
    std::memcpy(device.uuid, device.mig ? "dmuon fake mig" : "dmuon fake gpu", 14);
    device.uuid[15] = static_cast<unsigned char>(device.physical);
    devices.push_back(device);
  }
  return devices;
}

std::string Id(const Device& device) {
  std::string id = device.mig ? "MIG-" : "GPU-";
  for (size_t i = 0; i < sizeof(device.uuid); ++i) {
    char two[4];
    std::snprintf(two, sizeof(two), "%02x", device.uuid[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) id += '-';
    id += two;
  }
  return id;
}

// As CUDA reads it: what cannot be read ends the list, and so does a device that is named twice.
std::vector<Device> Visible(const std::vector<Device>& all, const std::string& list) {
  std::vector<Device> visible;
  std::set<int> seen;
  for (const std::string& item : Split(list)) {
    const Device* found = nullptr;
    for (const Device& device : all) {
      const bool by_number = !item.empty() &&
                             item.find_first_not_of("0123456789") == std::string::npos &&
                             std::atoi(item.c_str()) == device.physical;
      const bool by_id = item.size() > 4 && Id(device).compare(0, item.size(), item) == 0;
      if (by_number || by_id) found = &device;
    }
    if (found == nullptr || !seen.insert(found->physical).second) break;
    visible.push_back(*found);
  }
  return visible;
}

std::vector<Device>& Devices() {
  World& w = W();
  static bool read = false;
  if (!read) {
    read = true;
    w.devices = PhysicalDevices();
    if (const char* list = std::getenv("CUDA_VISIBLE_DEVICES"); list != nullptr)
      w.devices = Visible(w.devices, list);
  }
  return w.devices;
}

// Of one device, or the same for all.
bool InMode(const Device& device, const char* mode) {
  const char* text = std::getenv("DMUON_FAKE_CUDA_COMPUTE_MODE");
  if (text == nullptr) return false;
  const std::vector<std::string> modes = Split(text);
  return modes[modes.size() == 1 ? 0 : static_cast<size_t>(device.physical) % modes.size()] == mode;
}

// Its server has the device, and clients are not counted.
bool ThroughMps() {
  const char* directory = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  return directory != nullptr && access((std::string(directory) + "/control").c_str(), F_OK) == 0;
}

// One process a device: held by an abstract socket, which goes with the process however it ends.
bool TakeExclusively(const Device& device) {
  const char* node = std::getenv("DMUON_FAKE_CUDA_NODE");
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "dmuon_fake_gpu/%s/%d",
                node != nullptr ? node : "", device.physical);
  return bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
}

}  // namespace

const Device* DeviceOf(int ordinal) {
  const std::vector<Device>& devices = Devices();
  return ordinal >= 0 && static_cast<size_t>(ordinal) < devices.size()
             ? &devices[static_cast<size_t>(ordinal)]
             : nullptr;
}

cudaError_t MakeContext(int ordinal) {
  if (Devices().empty()) return cudaErrorNoDevice;
  if (DeviceOf(ordinal) == nullptr) return cudaErrorInvalidDevice;
  Device& device = Devices()[static_cast<size_t>(ordinal)];
  if (device.context) return cudaSuccess;
  if (InMode(device, "prohibited")) return cudaErrorDevicesUnavailable;
  if (InMode(device, "exclusive") && !ThroughMps() && !TakeExclusively(device))
    return cudaErrorDevicesUnavailable;
  device.context = true;
  return cudaSuccess;
}

// Whether DMUON_FAKE_CUDA_PEERS lets the two read each other.
bool ListedAsPeers(int a, int b) {
  const char* text = std::getenv("DMUON_FAKE_CUDA_PEERS");
  if (text == nullptr) return true;
  for (const std::string& pair : Split(text)) {
    int first = 0, second = 0;
    if (std::sscanf(pair.c_str(), "%d-%d", &first, &second) == 2 && first == std::min(a, b) &&
        second == std::max(a, b))
      return true;
  }
  return false;
}

bool CanAccessPeer(int device, int peer) {
  const Device* a = DeviceOf(device);
  const Device* b = DeviceOf(peer);
  return a != nullptr && b != nullptr && device != peer && !a->mig && !b->mig &&
         ListedAsPeers(device, peer);
}

size_t DeviceMemory() {
  const char* text = std::getenv("DMUON_FAKE_CUDA_MEMORY");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : kDefaultMemory;
}

}  // namespace dmuon_fakes

namespace {

struct ErrorText {
  cudaError_t code;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed",
     "mapping of buffer object failed"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled",
     "peer access has not been enabled"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capture has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText* TextOf(cudaError_t error) {
  for (const ErrorText& entry : kErrors) {
    if (entry.code == error) return &entry;
  }
  return nullptr;
}

}  // namespace

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  ENTER_ANYHOW("cudaGetDeviceCount");
  *count = static_cast<int>(Devices().size());
  return Answer(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  ENTER_ANYHOW("cudaSetDevice");
  const cudaError_t error = MakeContext(device);
  if (error == cudaSuccess) t_device = device;
  return Answer(error);
}
cudaError_t cudaGetDevice(int* device) {
  ENTER_ANYHOW("cudaGetDevice");
  *device = t_device;
  return cudaSuccess;
}
cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  ENTER_ANYHOW("cudaInitDevice");
  return Answer(MakeContext(device));
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int ordinal) {
  ENTER_ANYHOW("cudaGetDeviceProperties");
  const Device* device = DeviceOf(ordinal);
  if (device == nullptr) return Answer(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "%s", device->name.c_str());
  std::memcpy(properties->uuid.bytes, device->uuid, sizeof(device->uuid));
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->totalGlobalMem = DeviceMemory();
  properties->pciBusID = 1 + device->physical;
  properties->unifiedAddressing = 1;
  properties->isMultiGpuBoard = 0;
  properties->ipcEventSupported = Is("DMUON_FAKE_CUDA_IPC", "none") ? 0 : 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  ENTER_ANYHOW("cudaDeviceGetAttribute");
  if (DeviceOf(ordinal) == nullptr) return Answer(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrIpcEventSupport: *value = Is("DMUON_FAKE_CUDA_IPC", "none") ? 0 : 1; break;
    case cudaDevAttrComputeMode:
      *value = InMode(*DeviceOf(ordinal), "exclusive")    ? cudaComputeModeExclusiveProcess
               : InMode(*DeviceOf(ordinal), "prohibited") ? cudaComputeModeProhibited
                                                          : cudaComputeModeDefault;
      break;
    default: return Answer(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int ordinal) {
  ENTER_ANYHOW("cudaDeviceGetPCIBusId");
  const Device* device = DeviceOf(ordinal);
  if (device == nullptr) return Answer(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", 1 + device->physical);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER_ANYHOW("cudaDeviceCanAccessPeer");
  if (DeviceOf(device) == nullptr || DeviceOf(peer) == nullptr)
    return Answer(cudaErrorInvalidDevice);
  *can = CanAccessPeer(device, peer) ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  ENTER("cudaDeviceEnablePeerAccess");
  if (flags != 0) return Answer(cudaErrorInvalidValue);
  if (DeviceOf(peer) == nullptr || peer == t_device) return Answer(cudaErrorInvalidDevice);
  if (!CanAccessPeer(t_device, peer)) return Answer(cudaErrorPeerAccessUnsupported);
  const bool made = Devices()[static_cast<size_t>(t_device)].peers.insert(peer).second;
  return Answer(made ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  ENTER("cudaDeviceDisablePeerAccess");
  const bool was = Devices()[static_cast<size_t>(t_device)].peers.erase(peer) > 0;
  return Answer(was ? cudaSuccess : cudaErrorPeerAccessNotEnabled);
}
cudaError_t cudaDriverGetVersion(int* version) {
  ENTER_ANYHOW("cudaDriverGetVersion");
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  ENTER_ANYHOW("cudaRuntimeGetVersion");
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER("cudaDeviceGetStreamPriorityRange");
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  ENTER("cudaDeviceSynchronize");
  RunAll(call.lock(), t_device);
  return Answer(W().sticky);
}

// ---- errors

cudaError_t cudaGetLastError() {
  const cudaError_t last = t_last;
  t_last = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() { return t_last; }

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* text = TextOf(error);
  return text != nullptr ? text->name : "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* text = TextOf(error);
  return text != nullptr ? text->text : "unrecognized error code";
}

}  // extern "C"
