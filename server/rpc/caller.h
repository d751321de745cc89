// Who calls, by the connection the call came over.
#ifndef DMUON_SERVER_RPC_CALLER_H_
#define DMUON_SERVER_RPC_CALLER_H_

#include <grpcpp/server_context.h>
#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace dmuon::server::rpc {

// The descriptor in a gRPC peer string "fd:N"; nullopt for any other.
std::optional<int> PeerDescriptor(absl::string_view peer);

// The uid at the other end of the call's connection; nullopt when it is no connection of the control socket.
//
// gRPC names a connection that it was given as a descriptor `fd:N`, and the kernel is asked who is at the other end.
// N cannot have been closed, and given to another connection, while this call exists: a call holds its stream, a
// stream its transport, and the transport closes the descriptor when it is destroyed. The test
// GrpcServerTest.ADescriptorIsNotReusedWhileACallOfItsConnectionRuns holds gRPC to that.
std::optional<uid_t> CallerUid(const grpc::ServerContext& context);

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_CALLER_H_
