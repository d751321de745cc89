// The gRPC channel to a daemon's control.sock, and status codes across it.
#ifndef DMUON_CLIENT_CONTROL_CHANNEL_H_
#define DMUON_CLIENT_CONTROL_CHANNEL_H_

#include <grpcpp/grpcpp.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/endpoint.h"

namespace dmuon::client {

// FAILED_PRECONDITION in a process forked from one that used gRPC: gRPC does not survive fork.
absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenControlChannel(const Endpoint& endpoint);

absl::Status ToAbsl(const grpc::Status& status);

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_CONTROL_CHANNEL_H_
