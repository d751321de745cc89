#include "kernels/cuda/stream.h"

#include <cstring>

#include "base/checked_math.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "kernels/cuda/run_plan.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {
namespace {

constexpr size_t kLargestStagedCopy = 512 << 10;
constexpr size_t kMostDeliveries = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<StreamState>> StreamState::Create(int device) {
  auto state = std::unique_ptr<StreamState>(new StreamState(device));
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(device), "selecting the device"));
  int least = 0;
  int greatest = 0;
  RETURN_IF_ERROR(
      ToStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading stream priorities"));
  RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithPriority(&state->stream_, cudaStreamNonBlocking, greatest),
               "creating a stream"));
  ASSIGN_OR_RETURN(state->partials_, Buffer::Allocate(device, kScratchBytes));
  state->scratch_.partials = state->partials_.as<double>();
  state->scratch_.ticket = state->partials_.as<unsigned>(kMaxPartials * sizeof(double));
  void* staging = nullptr;
  RETURN_IF_ERROR(ToStatus(cudaHostAlloc(&staging, kStagingBytes, cudaHostAllocDefault),
                           "allocating page-locked memory"));
  state->staging_ = static_cast<char*>(staging);
  state->deliveries_.reserve(kMostDeliveries);
  for (cudaEvent_t& event : state->events_) {
    RETURN_IF_ERROR(
        ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
  }
  return state;
}

StreamState::~StreamState() {
  cudaError_t error = cudaSetDevice(device_);
  // What fails keeps nothing else from being given back.
  const auto note = [&error](cudaError_t given) {
    if (error == cudaSuccess) error = given;
  };
  if (stream_ != nullptr) {
    (void)cudaStreamSynchronize(stream_);
    note(cudaStreamDestroy(stream_));
  }
  for (cudaEvent_t event : events_) {
    if (event != nullptr) note(cudaEventDestroy(event));
  }
  if (staging_ != nullptr) note(cudaFreeHost(staging_));
  if (error != cudaSuccess && error != cudaErrorCudartUnloading) {
    Log(LogLevel::kWarning, "stream_not_destroyed",
        {{"reason", ToStatus(error, "destroying a stream").message()}});
  }
}

void StreamState::Note(cudaError_t error, absl::string_view doing) {
  if (error != cudaSuccess && first_failure_.ok()) first_failure_ = ToStatus(error, doing);
}

void StreamState::Note(const absl::Status& status) {
  if (first_failure_.ok()) first_failure_ = status;
}

char* StreamState::Stage(size_t bytes) {
  if (bytes > kLargestStagedCopy || staged_ + bytes > kStagingBytes) return nullptr;
  char* at = staging_ + staged_;
  staged_ = AlignUp(staged_ + bytes, 16);
  return at;
}

void StreamState::CopyToHost(void* host, const void* device, size_t bytes) {
  char* staged = deliveries_.size() < kMostDeliveries ? Stage(bytes) : nullptr;
  Note(cudaMemcpyAsync(staged != nullptr ? staged : host, device, bytes, cudaMemcpyDeviceToHost,
                       stream_),
       "copying to the host");
  if (staged != nullptr) deliveries_.push_back({host, staged, bytes});
}

void StreamState::CopyFromHost(void* device, const void* host, size_t bytes) {
  char* staged = Stage(bytes);
  if (staged != nullptr) std::memcpy(staged, host, bytes);
  Note(cudaMemcpyAsync(device, staged != nullptr ? staged : host, bytes, cudaMemcpyHostToDevice,
                       stream_),
       "copying from the host");
}

void StreamState::Select() {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current == device_) return;
  Note(cudaSetDevice(device_), "selecting the device");
}

uint64_t StreamState::Mark() {
  if (marked_ - reached_ < kMarks) ++marked_;
  deliveries_before_[marked_ % kMarks] = deliveries_.size();
  Note(cudaEventRecord(events_[marked_ % kMarks], stream_), "marking the stream");
  return marked_;
}

absl::StatusOr<bool> StreamState::Reached(uint64_t mark) {
  if (!first_failure_.ok()) return first_failure_;
  while (reached_ < mark) {
    const cudaError_t passed = cudaEventQuery(events_[(reached_ + 1) % kMarks]);
    if (passed == cudaErrorNotReady) return false;
    Note(passed, "asking for a mark");
    if (!first_failure_.ok()) return first_failure_;
    ++reached_;
    Deliver(deliveries_before_[reached_ % kMarks]);
  }
  return true;
}

void StreamState::Deliver(size_t end) {
  for (; delivered_ < end; ++delivered_) {
    const Delivery& d = deliveries_[delivered_];
    std::memcpy(d.host, d.staged, d.bytes);
  }
}

absl::Status StreamState::Synchronize() {
  const cudaError_t waited = cudaStreamSynchronize(stream_);
  Note(waited, "waiting for the stream");
  if (waited == cudaSuccess) reached_ = marked_;
  if (first_failure_.ok()) Deliver(deliveries_.size());
  deliveries_.clear();
  deliveries_before_.fill(0);
  delivered_ = 0;
  staged_ = 0;
  return std::exchange(first_failure_, absl::OkStatus());
}

}  // namespace dmuon::cuda
