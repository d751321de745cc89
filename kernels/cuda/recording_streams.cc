#include "kernels/cuda/recording_streams.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {

absl::StatusOr<std::unique_ptr<RecordingStreams>> RecordingStreams::Create(size_t operations) {
  auto streams = std::make_unique<RecordingStreams>();
  for (cudaStream_t& s : streams->streams_) {
    RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "creating a stream"));
  }
  streams->events_.resize(kLanes + operations, nullptr);
  for (cudaEvent_t& e : streams->events_) {
    RETURN_IF_ERROR(
        ToStatus(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "creating an event"));
  }
  return streams;
}

RecordingStreams::~RecordingStreams() {
  for (cudaEvent_t e : events_) {
    if (e != nullptr) (void)cudaEventDestroy(e);
  }
  for (cudaStream_t s : streams_) {
    if (s != nullptr) (void)cudaStreamDestroy(s);
  }
}

Lanes RecordingStreams::Group(int group, const Places& places, char* base) const {
  group = std::min(group, places.groups - 1);
  const auto first = static_cast<size_t>(group * (1 + Lanes::kSides));
  Lanes lanes;
  lanes.main = streams_[first];
  lanes.fork = events_[first];
  for (size_t i = 0; i < static_cast<size_t>(places.sides); ++i) {
    lanes.side[i] = streams_[first + 1 + i];
    lanes.join[i] = events_[first + 1 + i];
  }
  const auto before = static_cast<size_t>(group * (1 + places.sides));
  lanes.workspace = base + places.products + before * places.product_stride;
  lanes.workspace_stride = places.product_stride;
  return lanes;
}

}  // namespace dmuon::cuda
