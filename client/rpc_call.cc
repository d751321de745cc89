#include "client/rpc_call.h"

#include <chrono>

namespace dmuon::client {

RpcCall::~RpcCall() {
  // Every queue must be drained before it goes; an operation still under way ends with the cancel.
  context_.TryCancel();
  queue_.Shutdown();
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool RpcCall::Next() {
  for (;;) {
    void* tag;
    bool ok;
    switch (queue_.AsyncNext(&tag, &ok,
                             std::chrono::system_clock::now() + std::chrono::milliseconds(100))) {
      case grpc::CompletionQueue::GOT_EVENT: return ok;
      case grpc::CompletionQueue::SHUTDOWN: return false;
      case grpc::CompletionQueue::TIMEOUT: break;
    }
    if (!ended_by_look_.ok()) continue;
    ended_by_look_ = look_();
    if (!ended_by_look_.ok()) context_.TryCancel();
  }
}

absl::Status RpcCall::Result(const grpc::Status& status) const {
  return ended_by_look_.ok() || status.ok() ? ToAbsl(status) : ended_by_look_;
}

}  // namespace dmuon::client
