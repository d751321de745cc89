#include "client/rpc_call.h"

namespace dmuon::client {

RpcCall::RpcCall(std::function<absl::Status()> look)
    : look_(std::move(look)), next_look_(absl::Now() + kLookEvery) {}

RpcCall::~RpcCall() {
  // Every queue must be drained before it goes; an operation still under way ends with the cancel.
  context_.TryCancel();
  queue_.Shutdown();
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
  }
}

// A stream that never pauses must be left as quickly as one that never speaks, so the clock decides when to look.
void RpcCall::LookAtTimes() {
  const absl::Time now = absl::Now();
  if (!ended_by_look_.ok() || now < next_look_) return;
  next_look_ = now + kLookEvery;
  ended_by_look_ = look_();
  if (!ended_by_look_.ok()) context_.TryCancel();
}

bool RpcCall::Next() {
  for (;;) {
    LookAtTimes();
    void* tag;
    bool ok;
    switch (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(absl::Now() + kLookEvery))) {
      case grpc::CompletionQueue::GOT_EVENT: return ok;
      case grpc::CompletionQueue::SHUTDOWN: return false;
      case grpc::CompletionQueue::TIMEOUT: break;
    }
  }
}

absl::Status RpcCall::Result(const grpc::Status& status) const {
  return ended_by_look_.ok() || status.ok() ? ToAbsl(status) : ended_by_look_;
}

}  // namespace dmuon::client
