// Streams and events.
#include "tests/fakes/cudart_world.h"

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

namespace {

bool Known(cudaEvent_t event) { return W().events.count(event) > 0; }

cudaError_t MakeStream(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking)
    return cudaErrorInvalidValue;  // would wait for the default stream
  *stream = new CUstream_st();
  (*stream)->device = t_device;
  (*stream)->priority = std::min(0, std::max(priority, -5));
  W().streams.insert(*stream);
  ++W().counters.created;
  return cudaSuccess;
}

cudaError_t MakeEvent(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st();
  (*event)->flags = flags;
  (*event)->device = t_device;
  W().events.insert(*event);
  ++W().counters.created;
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  ENTER("cudaStreamCreateWithPriority");
  return Answer(MakeStream(stream, flags, priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  ENTER("cudaStreamCreateWithFlags");
  return Answer(MakeStream(stream, flags, 0));
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  ENTER("cudaStreamGetPriority");
  CUstream_st* s = Real(stream);
  if (s == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  *priority = s->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER("cudaStreamDestroy");
  if (W().streams.erase(stream) == 0) return Answer(cudaErrorInvalidResourceHandle);
  delete stream;  // what waits on it still runs
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER("cudaStreamSynchronize");
  CUstream_st* s = Real(stream);
  if (s == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  if (s->capture != nullptr) return Answer(cudaErrorStreamCaptureUnsupported);
  RunUntil(call.lock(), s->last);
  return Answer(W().sticky);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER("cudaStreamQuery");
  CUstream_st* s = Real(stream);
  if (s == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  if (s->capture != nullptr) return Answer(cudaErrorStreamCaptureUnsupported);
  RunOne();
  if (W().sticky != cudaSuccess) return Answer(W().sticky);
  return s->last == nullptr || s->last->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER("cudaLaunchHostFunc");
  CUstream_st* s = Real(stream);
  if (s == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  Enqueue(s, [=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ENTER("cudaEventCreateWithFlags");
  return MakeEvent(event, flags);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  ENTER("cudaEventCreate");
  return MakeEvent(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  ENTER("cudaEventDestroy");
  if (W().events.erase(event) == 0) return Answer(cudaErrorInvalidResourceHandle);
  delete event;  // a record that waits writes what it shares with the event
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER("cudaEventRecord");
  CUstream_st* s = Real(stream);
  if (s == nullptr || !Known(event) || event->device != s->device)
    return Answer(cudaErrorInvalidResourceHandle);
  event->capture = s->capture;
  if (s->capture == nullptr) Enqueue(s, [time = event->milliseconds] { *time = W().clock; });
  event->node = s->last;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER("cudaStreamWaitEvent");
  CUstream_st* s = Real(stream);
  if (s == nullptr || !Known(event)) return Answer(cudaErrorInvalidResourceHandle);
  if (event->node == nullptr && event->capture == nullptr) return cudaSuccess;
  if (event->capture != nullptr && s->capture == nullptr) {
    s->capture = event->capture;  // joins the recording
    s->capture->streams.insert(s);
    s->last = nullptr;
  }
  if (s->capture != event->capture) return Answer(cudaErrorStreamCaptureIsolation);
  const NodePtr node = event->node;
  Enqueue(s, nullptr);
  if (node != nullptr) s->last->after.push_back(node);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER("cudaEventQuery");
  if (!Known(event)) return Answer(cudaErrorInvalidResourceHandle);
  RunOne();
  if (W().sticky != cudaSuccess) return Answer(W().sticky);
  return event->node == nullptr || event->node->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER("cudaEventSynchronize");
  if (!Known(event)) return Answer(cudaErrorInvalidResourceHandle);
  RunUntil(call.lock(), event->node);
  return Answer(W().sticky);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  ENTER("cudaEventElapsedTime");
  if (!Known(start) || !Known(stop)) return Answer(cudaErrorInvalidResourceHandle);
  if (((start->flags | stop->flags) & cudaEventDisableTiming) != 0 || start->node == nullptr ||
      stop->node == nullptr) {
    return Answer(cudaErrorInvalidResourceHandle);
  }
  if (!start->node->done || !stop->node->done) return cudaErrorNotReady;
  *milliseconds = static_cast<float>(*stop->milliseconds - *start->milliseconds);
  return cudaSuccess;
}

}  // extern "C"
