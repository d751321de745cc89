// Streams and events of a recording of Newton-Schulz: two groups of lanes, for products that may run beside each other.
#ifndef DMUON_KERNELS_CUDA_RECORDING_STREAMS_H_
#define DMUON_KERNELS_CUDA_RECORDING_STREAMS_H_

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/symmetric.h"

namespace dmuon::cuda {

class RecordingStreams {
 public:
  static constexpr int kLanes = kLaneGroups * (1 + Lanes::kSides);

  static absl::StatusOr<std::unique_ptr<RecordingStreams>> Create(size_t operations);
  RecordingStreams() = default;
  ~RecordingStreams();
  RecordingStreams(const RecordingStreams&) = delete;
  RecordingStreams& operator=(const RecordingStreams&) = delete;

  // One of the groups of a plan, with its part of the workspace at `base`; the last one where there are fewer.
  Lanes Group(int group, const Places& places, char* base) const;
  // Recorded when this operation is done.
  cudaEvent_t done(size_t operation) const { return events_[kLanes + operation]; }

 private:
  std::array<cudaStream_t, kLanes> streams_ = {};
  std::vector<cudaEvent_t> events_;
};

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_RECORDING_STREAMS_H_
