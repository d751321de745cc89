// From domain errors to gRPC's. The codes are the same numbers in absl and in gRPC and mean the same, so the table is
// the identity; what is added is a bound on the text, which travels in a header of at most 8 KiB.
#ifndef DMUON_SERVER_RPC_STATUS_H_
#define DMUON_SERVER_RPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dmuon::server::rpc {

grpc::Status ToGrpc(const absl::Status& status);

// UNIMPLEMENTED that names the RPC, "dmuon.v1.Trainer/Step".
grpc::Status NotBuilt(absl::string_view rpc);

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_STATUS_H_
