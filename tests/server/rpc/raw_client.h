// A client for services whose generated code is not at hand: reflection and health, as an operator's tool would ask.
#ifndef DMUON_TESTS_SERVER_RPC_RAW_CLIENT_H_
#define DMUON_TESTS_SERVER_RPC_RAW_CLIENT_H_

#include <grpcpp/channel.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dmuon::server::rpc {

// A channel with its own connection.
std::shared_ptr<grpc::Channel> Dial(const std::string& socket);

// A channel over a connection that was made as `uid`. Needs root.
std::shared_ptr<grpc::Channel> DialAs(uid_t uid, const std::string& socket);

// The names that grpc.reflection.v1alpha lists.
absl::StatusOr<std::vector<std::string>> ListServices(
    const std::shared_ptr<grpc::Channel>& channel);

enum class Health { kUnknown = 0, kServing = 1, kNotServing = 2 };
absl::StatusOr<Health> CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                                   const std::string& service);

}  // namespace dmuon::server::rpc

#endif  // DMUON_TESTS_SERVER_RPC_RAW_CLIENT_H_
