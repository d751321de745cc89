#include "server/rpc/trainer_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "proto/wire/attach_frame.h"
#include "server/rpc/convert.h"
#include "server/rpc/state_assembler.h"
#include "server/rpc/status.h"

namespace dmuon::server::rpc {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

absl::string_view TokenOf(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find(wire::kTokenMetadata);
  if (it == metadata.end()) return {};
  return {it->second.data(), it->second.size()};
}

// False when the caller has gone away.
bool WriteChunks(const v1::StateName& name, absl::Span<const std::byte> data,
                 grpc::ServerWriter<v1::StateChunk>* writer) {
  size_t at = 0;
  do {
    v1::StateChunk chunk;
    if (at == 0) {
      *chunk.mutable_state() = name;
      chunk.set_total_bytes(data.size());
    }
    const size_t length = std::min(kChunkBytes, data.size() - at);
    chunk.set_data(data.data() + at, length);
    if (!writer->Write(chunk)) return false;
    at += length;
  } while (at < data.size());
  return true;
}

std::string WithoutTrailingSlash(absl::string_view path) {
  while (path.size() > 1 && absl::ConsumeSuffix(&path, "/")) {
  }
  return std::string(path);
}

}  // namespace

TrainerService::TrainerService(SessionTable& table, AttachmentCalls attachments,
                               std::string socket_dir)
    : table_(table),
      attachments_(std::move(attachments)),
      socket_dir_(WithoutTrailingSlash(socket_dir)) {}

grpc::Status TrainerService::As(
    const grpc::ServerContext& context,
    const std::function<absl::Status(const server::Trainer&)>& handler) {
  const absl::StatusOr<server::Trainer> trainer = attachments_.begin(TokenOf(context));
  if (!trainer.ok()) return ToGrpc(trainer.status());
  const absl::Cleanup end = [&] { attachments_.end(trainer->attachment); };
  return ToGrpc(handler(*trainer));
}

absl::Status TrainerService::CheckCoordinator(const std::string& coordinator) const {
  if (coordinator.empty()) return absl::OkStatus();
  if (WithoutTrailingSlash(absl::StripPrefix(coordinator, "unix:")) == socket_dir_)
    return absl::OkStatus();
  return absl::UnimplementedError(
      "coordinator: a session over several daemons is not built yet: all ranks must use the same "
      "daemon");
}

grpc::Status TrainerService::OpenSession(grpc::ServerContext* context,
                                         const v1::OpenSessionRequest* request,
                                         v1::OpenSessionResponse* response) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    RETURN_IF_ERROR(CheckCoordinator(request->coordinator()));
    ASSIGN_OR_RETURN(OpenSpec spec, FromProto(*request));
    const ParameterTable table = spec.table;
    ASSIGN_OR_RETURN(const Opened opened, table_.Open(trainer, std::move(spec)));
    attachments_.entered(trainer.attachment, opened.id);
    *response = ToProto(opened, table);
    return absl::OkStatus();
  });
}

grpc::Status TrainerService::ConfigureGroups(grpc::ServerContext* context,
                                             const v1::ConfigureGroupsRequest* request,
                                             v1::ConfigureGroupsResponse* response) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    ASSIGN_OR_RETURN(const int rank, Rank(request->rank()));
    ASSIGN_OR_RETURN(OptimizerSpec spec, FromProto(*request));
    ASSIGN_OR_RETURN(
        const Configured configured,
        table_.Configure(trainer, SessionId(request->session_id()), rank, std::move(spec)));
    *response = ToProto(configured);
    return absl::OkStatus();
  });
}

grpc::Status TrainerService::RegisterBuffers(grpc::ServerContext* context,
                                             const v1::RegisterBuffersRequest* request,
                                             v1::RegisterBuffersResponse* response) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    ASSIGN_OR_RETURN(const int rank, Rank(request->rank()));
    ASSIGN_OR_RETURN(const Registration registration, FromProto(*request));
    ASSIGN_OR_RETURN(
        const Registered registered,
        table_.Register(trainer, SessionId(request->session_id()), rank, registration));
    *response = ToProto(registered);
    return absl::OkStatus();
  });
}

grpc::Status TrainerService::ConfirmBuffers(grpc::ServerContext* context,
                                            const v1::ConfirmBuffersRequest* request,
                                            v1::ConfirmBuffersResponse* response) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    ASSIGN_OR_RETURN(const int rank, Rank(request->rank()));
    ASSIGN_OR_RETURN(
        const uint64_t step,
        table_.Confirm(trainer, SessionId(request->session_id()), rank,
                       std::vector<std::string>(request->found().begin(), request->found().end())));
    response->set_step(step);
    return absl::OkStatus();
  });
}

grpc::Status TrainerService::Step(grpc::ServerContext*, const v1::StepRequest*, v1::StepResponse*) {
  return NotBuilt("dmuon.v1.Trainer/Step");
}

grpc::Status TrainerService::GetStepResult(grpc::ServerContext* context,
                                           const v1::GetStepResultRequest* request,
                                           v1::GetStepResultResponse* response) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    ASSIGN_OR_RETURN(const StepReport report,
                     table_.StepResult(trainer, SessionId(request->session_id()), request->step(),
                                       request->with_blocks()));
    *response->mutable_record() = ToProto(report);
    return absl::OkStatus();
  });
}

grpc::Status TrainerService::ReadState(grpc::ServerContext* context,
                                       const v1::ReadStateRequest* request,
                                       grpc::ServerWriter<v1::StateChunk>* writer) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    for (const v1::StateName& name : request->states()) {
      absl::StatusOr<StateKind> kind = FromProto(name.kind());
      if (!kind.ok()) return Annotate(kind.status(), absl::StrCat("'", name.parameter(), "'"));
      ASSIGN_OR_RETURN(
          const std::vector<std::byte> data,
          table_.ReadState(trainer, SessionId(request->session_id()), name.parameter(), *kind));
      if (!WriteChunks(name, data, writer)) return absl::CancelledError("the caller has gone away");
    }
    return absl::OkStatus();
  });
}

grpc::Status TrainerService::WriteState(grpc::ServerContext* context,
                                        grpc::ServerReader<v1::WriteStateRequest>* reader,
                                        v1::WriteStateResponse* response) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    SessionId session;
    StateAssembler assembler(
        [&](const std::string& parameter, StateKind kind) {
          return table_.StateBytes(trainer, session, parameter, kind);
        },
        [&](const std::string& parameter, StateKind kind, absl::Span<const std::byte> data) {
          return table_.WriteState(trainer, session, parameter, kind, data);
        });
    v1::WriteStateRequest request;
    for (bool first = true; reader->Read(&request); first = false) {
      if (first) session = SessionId(request.session_id());
      RETURN_IF_ERROR(assembler.Add(request.chunk()));
    }
    RETURN_IF_ERROR(assembler.Finish());
    response->set_states_written(static_cast<uint32_t>(assembler.states_written()));
    return absl::OkStatus();
  });
}

grpc::Status TrainerService::CloseSession(grpc::ServerContext* context,
                                          const v1::CloseSessionRequest* request,
                                          v1::CloseSessionResponse*) {
  return As(*context, [&](const server::Trainer& trainer) -> absl::Status {
    ASSIGN_OR_RETURN(const int rank, Rank(request->rank()));
    const SessionId session(request->session_id());
    const absl::Status closed = table_.Close(trainer, session, rank);
    if (closed.ok() || absl::IsNotFound(closed)) attachments_.left(trainer.attachment, session);
    return closed;
  });
}

}  // namespace dmuon::server::rpc
