// What kernels::Stream::handle points to: a stream of the device with the private memory that its operations need, so that
// no operation allocates. Used by one thread at a time, the slot's worker.
#ifndef DMUON_KERNELS_CUDA_STREAM_H_
#define DMUON_KERNELS_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/buffer.h"
#include "kernels/cuda/launch.h"

namespace dmuon::cuda {

class StreamState {
 public:
  // A non-blocking stream of the highest priority the device offers: a step is on the trainer's way.
  static absl::StatusOr<std::unique_ptr<StreamState>> Create(int device);
  ~StreamState();
  StreamState(const StreamState&) = delete;
  StreamState& operator=(const StreamState&) = delete;

  cudaStream_t get() const { return stream_; }
  const ReductionScratch& scratch() const { return scratch_; }

  // Keeps the first failure, for Synchronize. `doing` must be a literal.
  void Note(cudaError_t error, absl::string_view doing);
  void Note(const absl::Status& status);

  // Small copies go through page-locked memory, so that they do not wait: a copy to pageable memory would. What is copied to
  // the host is there once a mark behind it is reached.
  void CopyToHost(void* host, const void* device, size_t bytes);
  void CopyFromHost(void* device, const void* host, size_t bytes);

  // As Backend::Mark and Backend::Reached. A failure stays for Synchronize to return.
  uint64_t Mark();
  absl::StatusOr<bool> Reached(uint64_t mark);

  // Makes the stream's device the calling thread's.
  void Select();

  // Waits, hands out what CopyToHost still owes, and returns and forgets the first failure since the last call.
  absl::Status Synchronize();

 private:
  explicit StreamState(int device) : device_(device) {}
  // `bytes` of page-locked memory until the next Synchronize; null when it is used up.
  char* Stage(size_t bytes);
  // Hands out the deliveries up to the one of this number.
  void Deliver(size_t end);

  static constexpr uint64_t kMarks = 64;
  struct Delivery {
    void* host;
    const char* staged;
    size_t bytes;
  };

  const int device_;
  cudaStream_t stream_ = nullptr;
  Buffer partials_;
  ReductionScratch scratch_;
  char* staging_ = nullptr;
  size_t staged_ = 0;
  std::vector<Delivery> deliveries_;  // capacity reserved; never grows
  size_t delivered_ = 0;              // of them, handed out already
  absl::Status first_failure_;
  // Mark m waits in event m % kMarks. When all are under way, the last event moves on and stands for several.
  std::array<cudaEvent_t, kMarks> events_ = {};
  std::array<size_t, kMarks> deliveries_before_ = {};
  uint64_t marked_ = 0;   // the last one that an event stands for
  uint64_t reached_ = 0;  // and the last one that was passed
};

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_STREAM_H_
