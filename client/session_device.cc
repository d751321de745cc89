// A session whose arenas are in this process's device memory.
#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/session_impl.h"

namespace dmuon::client {
namespace {

constexpr int kSpareEvents = 8;  // beyond one for each boundary

void Describe(const DeviceArena& arena, v1::BufferKind kind, const std::string& gpu,
              v1::RegisterBuffersRequest& request) {
  v1::Buffer* buffer = request.add_buffers();
  buffer->set_kind(kind);
  buffer->set_size(arena.bytes());
  buffer->set_ipc_handle(arena.handle());
  buffer->set_gpu_uuid(gpu);
}

}  // namespace

absl::Status Session::Impl::ChooseDevice() {
  ASSIGN_OR_RETURN(cuda, CudaRuntime::Load());
  int count = 0;
  RETURN_IF_ERROR(cuda->Check(cuda->get_device_count(&count), "looking for CUDA devices"));
  if (wanted_device.has_value()) {
    if (*wanted_device < 0 || *wanted_device >= count) {
      return absl::InvalidArgumentError(
          absl::StrFormat("device: expected 0 to %d, got %d", count - 1, *wanted_device));
    }
    device = *wanted_device;
  } else {
    RETURN_IF_ERROR(cuda->Check(cuda->get_device(&device), "asking for the current device"));
  }
  ASSIGN_OR_RETURN(gpu, cuda->NameOf(device));
  return cuda->CheckShareable(device);
}

absl::Status Session::Impl::AllocateArenas(uint64_t grad_bytes, uint64_t weight_bytes) {
  ASSIGN_OR_RETURN(device_grad, DeviceArena::Allocate(*cuda, device, grad_bytes, "GRAD"));
  auto allocated = DeviceArena::Allocate(*cuda, device, weight_bytes, "WEIGHT");
  if (!allocated.ok()) {
    device_grad.Free();
    return allocated.status();
  }
  device_weight = *std::move(allocated);
  grad_base = device_grad.base();
  weight_base = device_weight.base();
  return absl::OkStatus();
}

absl::Status Session::Impl::DescribeArenas(v1::RegisterBuffersRequest& request) const {
  int driver = 0, runtime = 0;
  RETURN_IF_ERROR(cuda->Check(cuda->driver_get_version(&driver), "asking for the driver"));
  RETURN_IF_ERROR(cuda->Check(cuda->runtime_get_version(&runtime), "asking for the runtime"));
  request.set_driver_version(static_cast<uint32_t>(driver));
  request.set_runtime_version(static_cast<uint32_t>(runtime));
  Describe(device_grad, v1::BUFFER_KIND_GRAD, gpu, request);
  Describe(device_weight, v1::BUFFER_KIND_WEIGHT, gpu, request);
  return absl::OkStatus();
}

// Says what the daemon's probes have left, and takes it away: arenas begin with zeros.
absl::StatusOr<uint64_t> Session::Impl::Confirm(const v1::RegisterBuffersResponse& response) {
  v1::ConfirmBuffersRequest request;
  request.set_session_id(id);
  request.set_rank(rank);
  for (const v1::Probe& probe : response.probes()) {
    const DeviceArena& arena = probe.kind() == v1::BUFFER_KIND_GRAD ? device_grad : device_weight;
    if (probe.size() > arena.bytes() || probe.offset() > arena.bytes() - probe.size()) {
      return absl::InternalError(
          absl::StrFormat("the daemon probes %d bytes at %d of an arena of %d", probe.size(),
                          probe.offset(), arena.bytes()));
    }
    std::string found(probe.size(), '\0');
    RETURN_IF_ERROR(arena.CopyOut(probe.offset(), found.data(), found.size()));
    const std::string zeros(found.size(), '\0');
    RETURN_IF_ERROR(arena.CopyIn(probe.offset(), zeros.data(), zeros.size()));
    request.add_found(std::move(found));
  }
  v1::ConfirmBuffersResponse confirmed;
  RETURN_IF_ERROR(
      connection->Unary(&v1::Trainer::Stub::PrepareAsyncConfirmBuffers, request, confirmed));
  return confirmed.step();
}

absl::Status Session::Impl::StartEvents() {
  const int windows = static_cast<int>(boundaries.size());
  const auto act = [this](const EventThread::Work& work) {
    return work.kind == EventThread::Kind::kReady ? PushReady(work.boundary)
                                                  : PushRelease(work.boundary);
  };
  ASSIGN_OR_RETURN(readies,
                   EventThread::Start(*cuda, device, windows, windows + kSpareEvents, act));
  ASSIGN_OR_RETURN(releases,
                   EventThread::Start(*cuda, device, windows, windows + kSpareEvents, act));
  return absl::OkStatus();
}

// A daemon that does not answer may still have the memory mapped. One that is dead has not.
void Session::Impl::NoteClosed(const absl::Status& closed) {
  let_go = !registered || closed.ok() || absl::IsNotFound(closed) ||
           !connection->attach->CheckAlive().ok();
}

Session::Impl::~Impl() {
  if (!let_go || cuda == nullptr) return;  // else the memory is left to the end of the process
  // On a thread of its own, since going back to the device that is current in this one could make a context there.
  std::thread([this] {
    cuda->set_device(device);
    device_grad.Free();
    device_weight.Free();
  }).join();
}

absl::Status Session::Impl::Later(EventThread::Kind kind, int boundary, DeviceStream stream) {
  if (readies == nullptr) {
    return absl::FailedPreconditionError(
        "a stream: this session's arenas are in the host's memory, where nothing is behind");
  }
  EventThread& thread = kind == EventThread::Kind::kReady ? *readies : *releases;
  return thread.After(stream.handle, {kind, boundary, window[static_cast<size_t>(boundary)]});
}

absl::Status Session::Impl::Settle() {
  if (readies == nullptr) return absl::OkStatus();
  const auto look = [this] { return connection->Look(); };
  RETURN_IF_ERROR(readies->WaitAll(look));
  return releases->WaitAll(look);
}

absl::Status Session::Impl::SettleWindow(int of_boundary) {
  if (readies == nullptr) return absl::OkStatus();
  const int of_window = window[static_cast<size_t>(of_boundary)];
  const auto look = [this] { return connection->Look(); };
  RETURN_IF_ERROR(readies->WaitWindow(of_window, look));
  return releases->WaitWindow(of_window, look);
}

}  // namespace dmuon::client
