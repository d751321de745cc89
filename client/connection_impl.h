// What a connection is made of; for the files of this library and for tests.
#ifndef DMUON_CLIENT_CONNECTION_IMPL_H_
#define DMUON_CLIENT_CONNECTION_IMPL_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/attach_socket.h"
#include "client/dmuon/client.h"
#include "client/endpoint.h"
#include "client/rpc_call.h"
#include "dmuon/v1/trainer.grpc.pb.h"

namespace dmuon::client {

struct Connection::Impl {
  Endpoint endpoint;
  std::string text;  // the endpoint as it was given
  std::string client_uuid;
  pid_t owner = 0;  // the process that opened it
  std::unique_ptr<AttachSocket> attach;
  std::atomic<uint64_t> grpc_calls{0};

  // FAILED_PRECONDITION in a forked child: sockets, mappings and gRPC's threads stayed with the
  // parent.
  absl::Status CheckProcess() const;
  bool ForkedChild() const;
  // What every waiting thread looks at about ten times a second: UNAVAILABLE when the daemon is
  // gone, CANCELLED when the interrupt check says so.
  absl::Status Look() const ABSL_LOCKS_EXCLUDED(interrupt_mu);
  // The stub of the Trainer service; its channel is made with the first call.
  absl::StatusOr<v1::Trainer::Stub*> Trainer() ABSL_LOCKS_EXCLUDED(channel_mu);

  void Authorize(grpc::ClientContext& context) const;

  // One unary call of the Trainer service. UNAVAILABLE says which daemon and what to do.
  template <typename Request, typename Response>
  absl::Status Unary(std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (
                         v1::Trainer::Stub::*prepare)(grpc::ClientContext*, const Request&,
                                                      grpc::CompletionQueue*),
                     const Request& request, Response& response,
                     absl::Duration timeout = absl::InfiniteDuration()) {
    const absl::StatusOr<v1::Trainer::Stub*> stub = Trainer();
    if (!stub.ok()) return stub.status();
    RpcCall call([this] { return Look(); });
    if (timeout != absl::InfiniteDuration()) call.set_timeout(timeout);
    Authorize(call.context());
    return CallUnary(call, **stub, prepare, request, response);
  }

  mutable absl::Mutex interrupt_mu;
  std::function<bool()> interrupted ABSL_GUARDED_BY(interrupt_mu);

  absl::Mutex channel_mu;
  std::unique_ptr<v1::Trainer::Stub> trainer ABSL_GUARDED_BY(channel_mu);
};

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_CONNECTION_IMPL_H_
