#include "client/ctl/admin.h"

#include <signal.h>
#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/control_channel.h"
#include "client/rpc_call.h"

namespace dmuon::ctl {
namespace {

volatile sig_atomic_t g_interrupted = 0;

absl::Status Look() {
  return g_interrupted != 0 ? absl::CancelledError("interrupted") : absl::OkStatus();
}

}  // namespace

void InstallInterrupt() {
  struct sigaction action {};
  action.sa_handler = [](int) { g_interrupted = 1; };
  action.sa_flags = SA_RESETHAND;  // a second Ctrl-C ends the program at once
  sigaction(SIGINT, &action, nullptr);
}

absl::StatusOr<std::unique_ptr<Admin>> Admin::Connect(const std::string& endpoint,
                                                      absl::Duration timeout) {
  ASSIGN_OR_RETURN(client::Endpoint parsed, client::ParseEndpoint(endpoint));
  // A plain connect says what gRPC does not: which path, and why.
  RETURN_IF_ERROR(
      client::ConnectUnix(parsed, parsed.control_path(), SOCK_STREAM, timeout).status());
  ASSIGN_OR_RETURN(auto channel, client::OpenControlChannel(parsed));
  std::unique_ptr<Admin> admin(new Admin(std::move(parsed), timeout));
  admin->stub_ = v1::Admin::NewStub(channel);
  return admin;
}

template <typename Request, typename Response>
absl::StatusOr<Response> Admin::Call(std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (
                                         v1::Admin::Stub::*prepare)(grpc::ClientContext*,
                                                                    const Request&,
                                                                    grpc::CompletionQueue*),
                                     const Request& request) {
  client::RpcCall call(Look);
  call.set_timeout(timeout_);
  Response response;
  const absl::Status status = client::CallUnary(call, *stub_, prepare, request, response);
  if (absl::IsDeadlineExceeded(status)) {
    return client::NoAnswerError(endpoint_, timeout_);
  }
  RETURN_IF_ERROR(Gone(status));
  return response;
}

absl::StatusOr<v1::GetInfoResponse> Admin::Info() {
  return Call(&v1::Admin::Stub::PrepareAsyncGetInfo, v1::GetInfoRequest());
}

absl::StatusOr<v1::ListSessionsResponse> Admin::Sessions() {
  return Call(&v1::Admin::Stub::PrepareAsyncListSessions, v1::ListSessionsRequest());
}

absl::StatusOr<v1::DescribeSessionResponse> Admin::Session(const std::string& name) {
  v1::DescribeSessionRequest request;
  request.set_name(name);
  return Call(&v1::Admin::Stub::PrepareAsyncDescribeSession, request);
}

absl::StatusOr<v1::DescribeStepResponse> Admin::Step(const std::string& name, uint64_t step) {
  v1::DescribeStepRequest request;
  request.set_name(name);
  request.set_step(step);
  return Call(&v1::Admin::Stub::PrepareAsyncDescribeStep, request);
}

absl::StatusOr<v1::DrainResponse> Admin::Drain() {
  return Call(&v1::Admin::Stub::PrepareAsyncDrain, v1::DrainRequest());
}

absl::Status Admin::Steps(const std::string& name, bool follow, uint32_t last,
                          absl::FunctionRef<void(const v1::StepRecord&)> each) {
  v1::WatchStepsRequest request;
  request.set_name(name);
  request.set_follow(follow);
  request.set_last(last);
  client::RpcCall call(Look);
  if (!follow) call.set_timeout(timeout_);
  auto reader = stub_->PrepareAsyncWatchSteps(&call.context(), request, &call.queue());
  reader->StartCall(nullptr);
  if (call.Next()) {
    for (v1::StepRecord record;;) {
      reader->Read(&record, nullptr);
      if (!call.Next()) break;
      each(record);
    }
  }
  grpc::Status status;
  reader->Finish(&status, nullptr);
  call.Next();
  return Gone(call.Result(status));
}

// gRPC's own words for a daemon that dies ("Socket closed") or stops serving say nothing to an operator.
absl::Status Admin::Gone(const absl::Status& status) const {
  const bool ended = absl::IsCancelled(status) && g_interrupted == 0;
  if (!absl::IsUnavailable(status) && !ended) return status;
  return absl::UnavailableError(
      absl::StrFormat("the daemon at %s has gone away", endpoint_.directory));
}

}  // namespace dmuon::ctl
