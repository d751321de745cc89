#include "client/control_channel.h"

#include <unistd.h>

#include <atomic>

#include "absl/strings/str_format.h"

namespace dmuon::client {
namespace {

// The process in which gRPC was first used through this library.
std::atomic<pid_t> g_grpc_process{0};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenControlChannel(const Endpoint& endpoint) {
  pid_t expected = 0;
  if (!g_grpc_process.compare_exchange_strong(expected, getpid()) && expected != getpid()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "process %d was forked from process %d, which talks to a daemon already: gRPC does not "
        "survive fork; start trainers by exec or spawn, or fork before the first connection",
        getpid(), expected));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(64 << 20);  // a placement of 65 536 parameters
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A channel of its own for each connection, so that one's reconnect backoff is not another's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel("unix:" + endpoint.control_path(),
                                   grpc::InsecureChannelCredentials(), arguments);
}

absl::Status ToAbsl(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace dmuon::client
