// A recorded sequence of operations that is launched as one. Made outside the step.
#ifndef DMUON_KERNELS_CUDA_GRAPH_H_
#define DMUON_KERNELS_CUDA_GRAPH_H_

#include <cuda_runtime_api.h>

#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace dmuon::cuda {

class Graph {
 public:
  // What `enqueue` puts on `stream`, and on streams that it forks from it and joins again. Nothing runs yet. UNIMPLEMENTED:
  // nothing can be recorded here.
  static absl::StatusOr<Graph> Record(cudaStream_t stream,
                                      absl::FunctionRef<absl::Status()> enqueue);

  Graph() = default;
  Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(executable_, other.executable_);
    return *this;
  }
  ~Graph();

  // What the first launch would do besides: take memory of the device, and bring the graph there.
  cudaError_t Upload(cudaStream_t stream) const { return cudaGraphUpload(executable_, stream); }
  cudaError_t Launch(cudaStream_t stream) const { return cudaGraphLaunch(executable_, stream); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// Milliseconds that one `enqueue` takes on the device when its launches cost nothing, as in a replayed graph: the least of a
// few measurements of several in a row.
absl::StatusOr<float> Measure(cudaStream_t stream, cudaEvent_t start, cudaEvent_t stop,
                              absl::FunctionRef<absl::Status()> enqueue);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_GRAPH_H_
