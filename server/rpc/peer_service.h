// dmuon.v1.Peer: what the daemons of one session say to each other. Not built yet: every call says so.
#ifndef DMUON_SERVER_RPC_PEER_SERVICE_H_
#define DMUON_SERVER_RPC_PEER_SERVICE_H_

#include "dmuon/v1/peer.grpc.pb.h"
#include "server/rpc/status.h"

namespace dmuon::server::rpc {

class PeerService final : public v1::Peer::Service {
 public:
  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest*, v1::JoinResponse*) override {
    return NotBuilt("dmuon.v1.Peer/Join");
  }
};

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_PEER_SERVICE_H_
