// dmuon.v1.Admin: what an operator asks. Callers are known by the uid of their connection: the daemon's own uid, root
// and admin_uids see and may do everything; others see the sessions of their own uid.
#ifndef DMUON_SERVER_RPC_ADMIN_SERVICE_H_
#define DMUON_SERVER_RPC_ADMIN_SERVICE_H_

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dmuon/v1/admin.grpc.pb.h"
#include "server/session/session_table.h"

namespace dmuon::server::rpc {

// What does not change while the daemon runs.
struct DaemonInfo {
  std::string version;
  std::string instance_id;
  absl::Time started;
  std::string backend;
  std::string kernel;
  int threads = 0;
  std::string socket_dir;
  std::string costs;  // what placement and forms go by, and why
};

class AdminService final : public v1::Admin::Service {
 public:
  // `request_drain` must not block. `table` must outlive the service.
  AdminService(SessionTable& table, DaemonInfo info, std::vector<uid_t> admin_uids,
               std::function<void()> request_drain);

  grpc::Status GetInfo(grpc::ServerContext* context, const v1::GetInfoRequest* request,
                       v1::GetInfoResponse* response) override;
  grpc::Status ListSessions(grpc::ServerContext* context, const v1::ListSessionsRequest* request,
                            v1::ListSessionsResponse* response) override;
  grpc::Status DescribeSession(grpc::ServerContext* context,
                               const v1::DescribeSessionRequest* request,
                               v1::DescribeSessionResponse* response) override;
  grpc::Status WatchSteps(grpc::ServerContext* context, const v1::WatchStepsRequest* request,
                          grpc::ServerWriter<v1::StepRecord>* writer) override;
  grpc::Status DescribeStep(grpc::ServerContext* context, const v1::DescribeStepRequest* request,
                            v1::DescribeStepResponse* response) override;
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override;
  grpc::Status SaveSnapshot(grpc::ServerContext* context, const v1::SaveSnapshotRequest* request,
                            v1::SaveSnapshotResponse* response) override;
  grpc::Status RestoreSnapshot(grpc::ServerContext* context,
                               const v1::RestoreSnapshotRequest* request,
                               v1::RestoreSnapshotResponse* response) override;
  grpc::Status EvictSession(grpc::ServerContext* context, const v1::EvictSessionRequest* request,
                            v1::EvictSessionResponse* response) override;

 private:
  struct Caller {
    uid_t uid = 0;
    bool admin = false;
  };
  absl::StatusOr<Caller> WhoCalls(const grpc::ServerContext& context) const;
  absl::StatusOr<SessionDescription> DescribeFor(const grpc::ServerContext& context,
                                                 const std::string& name) const;
  absl::Status Watch(grpc::ServerContext& context, const v1::WatchStepsRequest& request,
                     grpc::ServerWriter<v1::StepRecord>& writer);

  SessionTable& table_;
  const DaemonInfo info_;
  const std::vector<uid_t> admin_uids_;
  const std::function<void()> request_drain_;
  std::atomic<int> watchers_{0};
};

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_ADMIN_SERVICE_H_
