#include "server/rpc/caller.h"

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "base/unix_socket.h"

namespace dmuon::server::rpc {

std::optional<int> PeerDescriptor(absl::string_view peer) {
  int fd;
  if (!absl::ConsumePrefix(&peer, "fd:") || !absl::SimpleAtoi(peer, &fd) || fd < 0)
    return std::nullopt;
  return fd;
}

std::optional<uid_t> CallerUid(const grpc::ServerContext& context) {
  const std::optional<int> fd = PeerDescriptor(context.peer());
  if (!fd.has_value()) return std::nullopt;
  const absl::StatusOr<PeerCredentials> credentials = ReadPeerCredentials(*fd);
  if (!credentials.ok()) return std::nullopt;
  return credentials->uid;
}

}  // namespace dmuon::server::rpc
