// dmuon.v1.Trainer: each handler finds out who calls, converts, asks the table of sessions, converts back.
#ifndef DMUON_SERVER_RPC_TRAINER_SERVICE_H_
#define DMUON_SERVER_RPC_TRAINER_SERVICE_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dmuon/v1/trainer.grpc.pb.h"
#include "server/session/session_table.h"

namespace dmuon::server::rpc {

// What the handlers need of the registry of attachments (server/attach/attachments.h has the contracts). Thread-safe.
struct AttachmentCalls {
  std::function<absl::StatusOr<Trainer>(absl::string_view token_hex)> begin;
  std::function<void(AttachmentId)>
      end;  // and undoes what the call did for a trainer that died meanwhile
  std::function<void(AttachmentId, SessionId)> entered;
  std::function<void(AttachmentId, SessionId)> left;
};

class TrainerService final : public v1::Trainer::Service {
 public:
  // `table` must outlive the service. `socket_dir` is how a trainer may name this daemon as its coordinator.
  TrainerService(SessionTable& table, AttachmentCalls attachments, std::string socket_dir);

  grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override;
  grpc::Status ConfigureGroups(grpc::ServerContext* context,
                               const v1::ConfigureGroupsRequest* request,
                               v1::ConfigureGroupsResponse* response) override;
  grpc::Status RegisterBuffers(grpc::ServerContext* context,
                               const v1::RegisterBuffersRequest* request,
                               v1::RegisterBuffersResponse* response) override;
  grpc::Status ConfirmBuffers(grpc::ServerContext* context,
                              const v1::ConfirmBuffersRequest* request,
                              v1::ConfirmBuffersResponse* response) override;
  grpc::Status Step(grpc::ServerContext* context, const v1::StepRequest* request,
                    v1::StepResponse* response) override;
  grpc::Status GetStepResult(grpc::ServerContext* context, const v1::GetStepResultRequest* request,
                             v1::GetStepResultResponse* response) override;
  grpc::Status ReadState(grpc::ServerContext* context, const v1::ReadStateRequest* request,
                         grpc::ServerWriter<v1::StateChunk>* writer) override;
  grpc::Status WriteState(grpc::ServerContext* context,
                          grpc::ServerReader<v1::WriteStateRequest>* reader,
                          v1::WriteStateResponse* response) override;
  grpc::Status CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest* request,
                            v1::CloseSessionResponse* response) override;

 private:
  // Runs `handler` as the trainer whose token the call carries.
  grpc::Status As(const grpc::ServerContext& context,
                  const std::function<absl::Status(const server::Trainer&)>& handler);
  absl::Status CheckCoordinator(const std::string& coordinator) const;

  SessionTable& table_;
  const AttachmentCalls attachments_;
  const std::string socket_dir_;
};

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_TRAINER_SERVICE_H_
