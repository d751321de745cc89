#include "kernels/cuda/graph.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {

absl::StatusOr<Graph> Graph::Record(cudaStream_t stream,
                                    absl::FunctionRef<absl::Status()> enqueue) {
  // Thread-local mode: other workers of this process go on allocating and synchronising meanwhile.
  const cudaError_t begun = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (begun == cudaErrorNotSupported || begun == cudaErrorStreamCaptureUnsupported)
    return absl::UnimplementedError(ToStatus(begun, "recording a graph").message());
  RETURN_IF_ERROR(ToStatus(begun, "recording a graph"));
  const absl::Status enqueued = enqueue();
  cudaGraph_t recorded = nullptr;
  const cudaError_t ended =
      cudaStreamEndCapture(stream, &recorded);  // also after a failure: else the stream is lost
  absl::Status status = enqueued.ok() ? ToStatus(ended, "recording a graph") : enqueued;
  Graph graph;
  if (status.ok())
    status = ToStatus(cudaGraphInstantiate(&graph.executable_, recorded, 0), "making a graph");
  if (recorded != nullptr) (void)cudaGraphDestroy(recorded);
  (void)cudaGetLastError();
  RETURN_IF_ERROR(status);
  return graph;
}

Graph::~Graph() {
  if (executable_ != nullptr) (void)cudaGraphExecDestroy(executable_);
}

absl::StatusOr<float> Measure(cudaStream_t stream, cudaEvent_t start, cudaEvent_t stop,
                              absl::FunctionRef<absl::Status()> enqueue) {
  constexpr float kEnough = 0.3f;  // milliseconds a measurement should last
  constexpr int kMostRepeats = 16;
  constexpr int kMeasurements = 2;
  // Once outside a recording: the first use of a kernel loads it, and a library may set itself up.
  RETURN_IF_ERROR(enqueue());
  RETURN_IF_ERROR(ToStatus(cudaStreamSynchronize(stream), "measuring"));
  float best = -1;
  for (int repeats = 1;;) {
    const auto all = [&]() -> absl::Status {
      for (int r = 0; r < repeats; ++r) RETURN_IF_ERROR(enqueue());
      return absl::OkStatus();
    };
    const absl::StatusOr<Graph> graph = Graph::Record(stream, all);
    if (graph.ok()) {
      RETURN_IF_ERROR(ToStatus(graph->Upload(stream), "measuring"));
    } else if (!absl::IsUnimplemented(graph.status())) {
      return graph.status();
    }
    // The first launch warms up.
    for (int i = 0; i < 1 + kMeasurements; ++i) {
      RETURN_IF_ERROR(ToStatus(cudaEventRecord(start, stream), "measuring"));
      RETURN_IF_ERROR(graph.ok() ? ToStatus(graph->Launch(stream), "measuring") : all());
      RETURN_IF_ERROR(ToStatus(cudaEventRecord(stop, stream), "measuring"));
      RETURN_IF_ERROR(ToStatus(cudaEventSynchronize(stop), "measuring"));
      float time = 0;
      RETURN_IF_ERROR(ToStatus(cudaEventElapsedTime(&time, start, stop), "measuring"));
      time /= static_cast<float>(repeats);
      if (i > 0 && (best < 0 || time < best)) best = time;
    }
    if (repeats > 1 || best >= kEnough) return best;
    repeats = std::clamp(static_cast<int>(kEnough / std::max(best, 1e-3f)), 2, kMostRepeats);
    best = -1;
  }
}

}  // namespace dmuon::cuda
