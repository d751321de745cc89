#include "server/rpc/admin_service.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/rpc/caller.h"
#include "server/rpc/convert.h"
#include "server/rpc/status.h"

namespace dmuon::server::rpc {
namespace {

constexpr int kMaxWatchers = 32;  // each holds a thread
constexpr absl::Duration kWatchTurn =
    absl::Milliseconds(200);  // how late a watcher notices that its caller left

}  // namespace

AdminService::AdminService(SessionTable& table, DaemonInfo info, std::vector<uid_t> admin_uids,
                           std::function<void()> request_drain)
    : table_(table),
      info_(std::move(info)),
      admin_uids_(std::move(admin_uids)),
      request_drain_(std::move(request_drain)) {}

absl::StatusOr<AdminService::Caller> AdminService::WhoCalls(
    const grpc::ServerContext& context) const {
  const std::optional<uid_t> uid = CallerUid(context);
  if (!uid.has_value())
    return absl::UnauthenticatedError("Admin answers over the control socket only");
  const bool admin = *uid == 0 || *uid == geteuid() ||
                     std::find(admin_uids_.begin(), admin_uids_.end(), *uid) != admin_uids_.end();
  return Caller{*uid, admin};
}

absl::StatusOr<SessionDescription> AdminService::DescribeFor(const grpc::ServerContext& context,
                                                             const std::string& name) const {
  ASSIGN_OR_RETURN(const Caller caller, WhoCalls(context));
  ASSIGN_OR_RETURN(SessionDescription session, table_.Describe(name));
  if (!caller.admin && session.uid != caller.uid) {
    return absl::PermissionDeniedError(
        absl::StrCat("session '", name, "' is another user's (admin_uids)"));
  }
  return session;
}

grpc::Status AdminService::GetInfo(grpc::ServerContext*, const v1::GetInfoRequest*,
                                   v1::GetInfoResponse* response) {
  response->set_version(info_.version);
  response->set_instance_id(info_.instance_id);
  response->set_started_unix_seconds(absl::ToUnixSeconds(info_.started));
  response->set_pid(getpid());
  response->set_backend(info_.backend);
  response->set_kernel(info_.kernel);
  response->set_threads(static_cast<uint32_t>(info_.threads));
  response->set_sessions(static_cast<uint32_t>(table_.size()));
  response->set_draining(table_.draining());
  response->set_socket_dir(info_.socket_dir);
  response->set_costs(info_.costs);
  return grpc::Status::OK;
}

grpc::Status AdminService::ListSessions(grpc::ServerContext* context,
                                        const v1::ListSessionsRequest*,
                                        v1::ListSessionsResponse* response) {
  const absl::StatusOr<Caller> caller = WhoCalls(*context);
  if (!caller.ok()) return ToGrpc(caller.status());
  for (const SessionDescription& session : table_.List()) {
    if (caller->admin || session.uid == caller->uid) *response->add_sessions() = Summary(session);
  }
  return grpc::Status::OK;
}

grpc::Status AdminService::DescribeSession(grpc::ServerContext* context,
                                           const v1::DescribeSessionRequest* request,
                                           v1::DescribeSessionResponse* response) {
  const absl::StatusOr<SessionDescription> session = DescribeFor(*context, request->name());
  if (!session.ok()) return ToGrpc(session.status());
  *response = ToProto(*session);
  return grpc::Status::OK;
}

grpc::Status AdminService::WatchSteps(grpc::ServerContext* context,
                                      const v1::WatchStepsRequest* request,
                                      grpc::ServerWriter<v1::StepRecord>* writer) {
  const absl::Cleanup leave = [this] { --watchers_; };
  if (++watchers_ > kMaxWatchers) {
    return ToGrpc(absl::ResourceExhaustedError(absl::StrCat("watchers: at most ", kMaxWatchers)));
  }
  return ToGrpc(Watch(*context, *request, *writer));
}

absl::Status AdminService::Watch(grpc::ServerContext& context, const v1::WatchStepsRequest& request,
                                 grpc::ServerWriter<v1::StepRecord>& writer) {
  RETURN_IF_ERROR(DescribeFor(context, request.name()).status());
  ASSIGN_OR_RETURN(std::vector<StepReport> reports,
                   table_.Steps(request.name(), 0, absl::ZeroDuration()));
  uint64_t seen = reports.empty() ? 0 : reports.back().step;
  if (reports.size() > request.last())
    reports.erase(reports.begin(), reports.end() - request.last());
  for (;;) {
    for (const StepReport& report : reports) {
      seen = std::max(seen, report.step);
      if (!writer.Write(ToProto(report))) return absl::CancelledError("the caller has gone away");
    }
    if (!request.follow()) return absl::OkStatus();
    if (context.IsCancelled()) return absl::CancelledError("the caller has gone away");
    absl::StatusOr<std::vector<StepReport>> next = table_.Steps(request.name(), seen, kWatchTurn);
    if (absl::IsNotFound(next.status()))
      return absl::OkStatus();  // the session has ended, and with it the watch
    if (!next.ok()) return next.status();
    reports = *std::move(next);
  }
}

grpc::Status AdminService::DescribeStep(grpc::ServerContext* context,
                                        const v1::DescribeStepRequest* request,
                                        v1::DescribeStepResponse* response) {
  if (const absl::Status status = DescribeFor(*context, request->name()).status(); !status.ok())
    return ToGrpc(status);
  const absl::StatusOr<StepReport> report = table_.DescribeStep(request->name(), request->step());
  if (!report.ok()) return ToGrpc(report.status());
  *response->mutable_record() = ToProto(*report);
  return grpc::Status::OK;
}

grpc::Status AdminService::Drain(grpc::ServerContext* context, const v1::DrainRequest*,
                                 v1::DrainResponse* response) {
  const absl::StatusOr<Caller> caller = WhoCalls(*context);
  if (!caller.ok()) return ToGrpc(caller.status());
  if (!caller->admin) {
    return ToGrpc(absl::PermissionDeniedError(
        absl::StrCat("uid ", caller->uid, " may not drain (admin_uids)")));
  }
  Log(LogLevel::kInfo, "drain_requested", {{"uid", caller->uid}});
  table_.StartDrain();
  response->set_sessions_left(static_cast<uint32_t>(table_.size()));
  request_drain_();
  return grpc::Status::OK;
}

grpc::Status AdminService::SaveSnapshot(grpc::ServerContext*, const v1::SaveSnapshotRequest*,
                                        v1::SaveSnapshotResponse*) {
  return NotBuilt("dmuon.v1.Admin/SaveSnapshot");
}

grpc::Status AdminService::RestoreSnapshot(grpc::ServerContext*, const v1::RestoreSnapshotRequest*,
                                           v1::RestoreSnapshotResponse*) {
  return NotBuilt("dmuon.v1.Admin/RestoreSnapshot");
}

grpc::Status AdminService::EvictSession(grpc::ServerContext*, const v1::EvictSessionRequest*,
                                        v1::EvictSessionResponse*) {
  return NotBuilt("dmuon.v1.Admin/EvictSession");
}

}  // namespace dmuon::server::rpc
