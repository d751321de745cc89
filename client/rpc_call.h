// One gRPC call that a waiting thread can give up: a dead daemon or an interrupt ends it within a
// tenth of a second.
#ifndef DMUON_CLIENT_RPC_CALL_H_
#define DMUON_CLIENT_RPC_CALL_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/control_channel.h"

namespace dmuon::client {

// How often a waiting thread looks at more than what it waits for.
inline constexpr absl::Duration kLookEvery = absl::Milliseconds(100);

class RpcCall {
 public:
  // `look` is asked every kLookEvery; the first error that it returns cancels the call.
  explicit RpcCall(std::function<absl::Status()> look);
  ~RpcCall();
  RpcCall(const RpcCall&) = delete;
  RpcCall& operator=(const RpcCall&) = delete;

  grpc::ClientContext& context() { return context_; }
  grpc::CompletionQueue& queue() { return queue_; }
  void set_timeout(absl::Duration timeout) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  }

  // Waits for the one operation that is under way; its `ok`.
  bool Next();
  // The call's end: what `look` said, if that ended it, else the server's word.
  absl::Status Result(const grpc::Status& status) const;

 private:
  void LookAtTimes();

  const std::function<absl::Status()> look_;
  absl::Time next_look_;
  absl::Status ended_by_look_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
};

// A unary call. `prepare` is &Stub::PrepareAsyncX.
template <typename Stub, typename Request, typename Response>
absl::Status CallUnary(RpcCall& call, Stub& stub,
                       std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (Stub::*prepare)(
                           grpc::ClientContext*, const Request&, grpc::CompletionQueue*),
                       const Request& request, Response& response) {
  auto reader = (stub.*prepare)(&call.context(), request, &call.queue());
  grpc::Status status;
  reader->StartCall();
  reader->Finish(&response, &status, nullptr);
  call.Next();
  return call.Result(status);
}

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_RPC_CALL_H_
