// What PyTorch needs to start, beside what the product calls.
#include <cuda_runtime_api.h>

#include "tests/fakes/cudart_world.h"

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

extern "C" {

int fake_cuda_has_context(int ordinal) {
  std::lock_guard lock(W().mutex);
  const Device* device = DeviceOf(ordinal);
  return device != nullptr && device->context ? 1 : 0;
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  ENTER("cudaStreamGetCaptureInfo");
  const CUstream_st* s = Real(stream);
  if (s == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  const bool active = s->capture != nullptr;
  *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = active ? reinterpret_cast<uintptr_t>(s->capture) : 0;
  if (graph != nullptr) *graph = active ? s->capture->graph : nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}

// How many; which they are, nothing here says.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  ENTER("cudaGraphGetNodes");
  if (nodes != nullptr) return Answer(cudaErrorNotSupported);
  if (W().graphs.count(graph) == 0) return Answer(cudaErrorInvalidValue);
  *count = graph->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return flags == cudaEventRecordDefault ? cudaEventRecord(event, stream)
                                         : Answer(cudaErrorNotSupported);
}

}  // extern "C"
