// State of parameters over gRPC: for checkpoints and initial weights, never in a step.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/convert.h"
#include "client/rpc_call.h"
#include "client/session_impl.h"

namespace dmuon::client {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

}  // namespace

absl::StatusOr<std::vector<std::byte>> Session::ReadState(const std::string& parameter,
                                                          StateKind kind) {
  Impl& s = *impl_;
  ASSIGN_OR_RETURN(v1::Trainer::Stub * stub, s.connection->Trainer());
  v1::ReadStateRequest request;
  request.set_session_id(s.id);
  v1::StateName* name = request.add_states();
  name->set_parameter(parameter);
  name->set_kind(static_cast<v1::StateKind>(kind));

  RpcCall call([&s] { return s.connection->Look(); });
  s.connection->Authorize(call.context());
  auto reader = stub->PrepareAsyncReadState(&call.context(), request, &call.queue());
  reader->StartCall(nullptr);
  std::vector<std::byte> state;
  uint64_t total = 0;
  size_t filled = 0;
  bool overflow = false;
  if (call.Next()) {
    v1::StateChunk chunk;
    for (bool first = true;; first = false) {
      reader->Read(&chunk, nullptr);
      if (!call.Next()) break;
      if (first) {
        total = chunk.total_bytes();
        state.reserve(total);
      }
      const std::string& data = chunk.data();
      overflow = overflow || data.size() > total - filled;
      if (overflow) continue;
      const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
      state.insert(state.end(), bytes, bytes + data.size());
      filled += data.size();
    }
  }
  grpc::Status status;
  reader->Finish(&status, nullptr);
  call.Next();
  RETURN_IF_ERROR(call.Result(status));
  if (overflow || filled != total) {
    return absl::DataLossError(absl::StrFormat("parameter '%s': expected %d bytes of state, got %s",
                                               parameter, total, overflow ? "more" : "fewer"));
  }
  return state;
}

absl::Status Session::WriteState(const std::string& parameter, StateKind kind,
                                 absl::Span<const std::byte> data) {
  Impl& s = *impl_;
  ASSIGN_OR_RETURN(v1::Trainer::Stub * stub, s.connection->Trainer());
  RpcCall call([&s] { return s.connection->Look(); });
  s.connection->Authorize(call.context());
  v1::WriteStateResponse response;
  auto writer = stub->PrepareAsyncWriteState(&call.context(), &response, &call.queue());
  writer->StartCall(nullptr);
  v1::WriteStateRequest request;
  request.set_session_id(s.id);
  request.mutable_chunk()->mutable_state()->set_parameter(parameter);
  request.mutable_chunk()->mutable_state()->set_kind(static_cast<v1::StateKind>(kind));
  request.mutable_chunk()->set_total_bytes(data.size());
  // A server that refuses ends the stream early: then stop writing and hear why.
  bool open = call.Next();
  do {
    const size_t n = std::min(data.size(), kChunkBytes);
    request.mutable_chunk()->set_data(reinterpret_cast<const char*>(data.data()), n);
    data.remove_prefix(n);
    if (!open) break;
    writer->Write(request, nullptr);
    open = call.Next();
    request = v1::WriteStateRequest();
  } while (!data.empty());
  if (open) {
    writer->WritesDone(nullptr);
    call.Next();
  }
  grpc::Status status;
  writer->Finish(&status, nullptr);
  call.Next();
  return call.Result(status);
}

absl::StatusOr<StepProfile> Session::LastProfile() {
  Impl& s = *impl_;
  v1::GetStepResultRequest request;
  request.set_session_id(s.id);
  v1::GetStepResultResponse response;
  RETURN_IF_ERROR(
      s.connection->Unary(&v1::Trainer::Stub::PrepareAsyncGetStepResult, request, response));
  return FromProto(response.record());
}

}  // namespace dmuon::client
