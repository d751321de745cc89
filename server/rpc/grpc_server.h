// The gRPC server behind control.sock: own accept, own check of who connects, then gRPC serves the descriptor.
//
// Synchronous services: a call holds a thread while its handler runs, and gRPC adds threads, so that calls which block
// (collective over the ranks) leave health and Admin alone. Health and reflection are on.
#ifndef DMUON_SERVER_RPC_GRPC_SERVER_H_
#define DMUON_SERVER_RPC_GRPC_SERVER_H_

#include <grpcpp/impl/service_type.h>
#include <grpcpp/server.h>

#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "base/unix_socket.h"

namespace dmuon::server::rpc {

struct GrpcServerOptions {
  UidPolicy uids;
  int max_connections_per_uid = 1024;
};

class GrpcServer {
 public:
  // `listener`: a SOCK_STREAM socket. The services must outlive the server.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(UniqueFd listener,
                                                           std::vector<grpc::Service*> services,
                                                           GrpcServerOptions options);
  ~GrpcServer();  // Stop, without patience

  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // What the health service answers, for the server and for each service.
  void SetServing(bool serving);

  // Accepts no more, lets calls end until `deadline`, cancels the rest and waits for their handlers.
  void Stop(absl::Time deadline);

 private:
  // A descriptor that gRPC was given, and the inode by which one sees that it is still the same socket.
  struct Given {
    uid_t uid = 0;
    ino_t inode = 0;
  };

  GrpcServer(UniqueFd listener, UniqueFd stop, GrpcServerOptions options);
  void Accept();
  void AcceptOne();
  bool HasRoom(uid_t uid);

  UniqueFd listener_;
  UniqueFd stop_;  // eventfd
  const GrpcServerOptions options_;
  std::unique_ptr<grpc::Server> server_;
  std::map<int, Given> given_;  // of the accepting thread
  bool accept_fails_ = false;   // since the last time that it went well; of the accepting thread
  std::thread thread_;
};

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_GRPC_SERVER_H_
