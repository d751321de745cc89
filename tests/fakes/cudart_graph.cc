// Recording streams into graphs, and launching those.
#include <algorithm>
#include <utility>

#include "tests/fakes/cudart_world.h"

namespace dmuon_fakes {
namespace {

// A graph's nodes as new operations of `stream`.
void Replay(const std::vector<NodePtr>& nodes, CUstream_st* stream) {
  if (W().instant) return;
  std::map<const Node*, NodePtr> copies;
  auto end = std::make_shared<Node>();
  end->device = stream->device;
  const NodePtr before = stream->last;
  for (const NodePtr& node : nodes) {
    auto copy = std::make_shared<Node>();
    copy->task = node->task;
    copy->words = node->words;
    copy->device = node->device;
    copy->copies = node->copies;
    for (const NodePtr& after : node->after) copy->after.push_back(copies.at(after.get()));
    if (copy->after.empty() && before != nullptr) copy->after.push_back(before);
    copies[node.get()] = copy;
    end->after.push_back(copy);
    W().pending.push_back(copy);
  }
  if (nodes.empty() && before != nullptr) end->after.push_back(before);
  W().pending.push_back(end);
  stream->last = end;
}

// Whether everything in the graph comes before the origin's last operation.
bool Joined(const Capture& capture) {
  std::set<const Node*> reached;
  std::vector<const Node*> open = {capture.origin->last.get()};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !reached.insert(node).second) continue;
    for (const NodePtr& after : node->after) open.push_back(after.get());
  }
  return std::all_of(capture.graph->nodes.begin(), capture.graph->nodes.end(),
                     [&](const NodePtr& n) { return reached.count(n.get()) > 0; });
}

}  // namespace
}  // namespace dmuon_fakes

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  ENTER("cudaStreamBeginCapture");
  if (W().streams.count(stream) == 0 || stream->capture != nullptr)
    return Answer(cudaErrorStreamCaptureUnsupported);
  stream->capture = new Capture{new CUgraph_st(), stream, {stream}};
  stream->last = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER("cudaStreamEndCapture");
  if (W().streams.count(stream) == 0) return Answer(cudaErrorInvalidResourceHandle);
  Capture* capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return Answer(cudaErrorIllegalState);
  const bool joined = Joined(*capture);
  for (CUstream_st* s : capture->streams) {
    s->capture = nullptr;
    s->last = nullptr;
  }
  *graph = joined ? capture->graph : nullptr;
  if (joined) {
    W().graphs.insert(*graph);
  } else {
    delete capture->graph;
  }
  delete capture;
  return Answer(joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER("cudaStreamIsCapturing");
  CUstream_st* s = Real(stream);
  if (s == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  *status = s->capture != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  ENTER("cudaGraphInstantiate");
  if (W().graphs.count(graph) == 0) return Answer(cudaErrorInvalidValue);
  *executable = new CUgraphExec_st{graph->nodes};
  W().executables.insert(*executable);
  ++W().counters.created;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER("cudaGraphDestroy");
  if (W().graphs.erase(graph) == 0) return Answer(cudaErrorInvalidValue);
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  ENTER("cudaGraphExecDestroy");
  if (W().executables.erase(executable) == 0) return Answer(cudaErrorInvalidValue);
  delete executable;  // what was launched is on its way by itself
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER("cudaGraphUpload");
  if (Real(stream) == nullptr || W().executables.count(executable) == 0)
    return Answer(cudaErrorInvalidResourceHandle);
  executable->uploaded = true;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER("cudaGraphLaunch");
  CUstream_st* s = Real(stream);
  if (s == nullptr || W().executables.count(executable) == 0)
    return Answer(cudaErrorInvalidResourceHandle);
  ++W().counters.launches;
  if (!std::exchange(executable->uploaded, true)) ++W().counters.lazy_loads;
  Replay(executable->nodes, s);
  return cudaSuccess;
}

}  // extern "C"
