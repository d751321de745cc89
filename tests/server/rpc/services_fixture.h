// The services over a real socket and a real table of sessions, with attachments that the test makes.
#ifndef DMUON_TESTS_SERVER_RPC_SERVICES_FIXTURE_H_
#define DMUON_TESTS_SERVER_RPC_SERVICES_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "dmuon/v1/admin.grpc.pb.h"
#include "dmuon/v1/trainer.grpc.pb.h"
#include "server/attach/attachments.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/trainer_service.h"
#include "server/session/session_table.h"
#include "tests/server/rpc/raw_client.h"
#include "tests/support/process.h"

namespace dmuon::server::rpc {

class ServicesTest : public ::testing::Test {
 protected:
  struct Attached {
    AttachmentId id;
    std::string token;
  };

  void SetUp() override {
    auto backend = kernels::CreateBackend("cpu", 1);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    table_ =
        std::make_unique<SessionTable>(*backend_, SessionLimits{.max_session_bytes = 64 << 20});
    trainer_service_ = std::make_unique<TrainerService>(
        *table_,
        AttachmentCalls{
            .begin = [this](absl::string_view token) { return attachments_.BeginCall(token); },
            .end =
                [this](AttachmentId id) {
                  if (!attachments_.EndCall(id)) table_->OnTrainerGone(id);
                },
            .entered = [this](AttachmentId id, SessionId s) { attachments_.Entered(id, s); },
            .left = [this](AttachmentId id, SessionId s) { attachments_.Left(id, s); }},
        dir_.path());
    admin_service_ = std::make_unique<AdminService>(
        *table_,
        DaemonInfo{
            .version = "1.2.3", .instance_id = "abc", .backend = "cpu", .socket_dir = dir_.path()},
        std::vector<uid_t>{4711}, [this] { ++drains_; });
    auto listener = ListenUnix(socket_, SOCK_STREAM, 0666);
    ASSERT_TRUE(listener.ok()) << listener.status();
    auto server =
        GrpcServer::Start(*std::move(listener), {trainer_service_.get(), admin_service_.get()}, {});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = Dial(socket_);
    trainer_ = v1::Trainer::NewStub(channel_);
    admin_ = v1::Admin::NewStub(channel_);
  }

  Attached Attach(uid_t uid = geteuid(), pid_t pid = getpid()) {
    auto added = attachments_.Add(uid, pid);
    EXPECT_TRUE(added.ok()) << added.status();
    return {added->trainer.attachment,
            absl::BytesToHexString(absl::string_view(
                reinterpret_cast<const char*>(added->token.data()), added->token.size()))};
  }
  void Kill(const Attached& attached) {
    attachments_.Remove(attached.id);
    table_->OnTrainerGone(attached.id);
  }

  // A context of a call with this token and a deadline.
  static std::unique_ptr<grpc::ClientContext> Context(const std::string& token = "") {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    if (!token.empty()) context->AddMetadata(wire::kTokenMetadata, token);
    return context;
  }

  // Two parameters, 'w' on muon and 'b' on adamw, in one boundary.
  static v1::OpenSessionRequest OpenRequest(const std::string& job, uint32_t rank = 0,
                                            uint32_t world = 1) {
    v1::OpenSessionRequest request;
    request.set_job(job);
    request.set_rank(rank);
    request.mutable_mesh()->set_replicate(1);
    request.mutable_mesh()->set_shard(world);
    request.mutable_mesh()->set_tp(1);
    request.add_boundaries()->set_name("layer");
    v1::Parameter& w = *request.add_parameters();
    w.set_name("layer.w");
    w.add_shape(8);
    w.add_shape(4);
    w.set_route(v1::ROUTE_MUON);
    v1::Parameter& b = *request.add_parameters();
    b.set_name("layer.b");
    b.add_shape(8);
    b.set_route(v1::ROUTE_ADAMW);
    return request;
  }

  static v1::ConfigureGroupsRequest ConfigureRequest(uint64_t session) {
    v1::ConfigureGroupsRequest request;
    request.set_session_id(session);
    for (v1::Route route : {v1::ROUTE_MUON, v1::ROUTE_ADAMW}) {
      v1::Group& group = *request.add_groups();
      group.set_name(v1::Route_Name(route));
      group.set_route(route);
    }
    for (uint32_t group : {0u, 1u}) {
      v1::ParameterConfig& config = *request.add_parameters();
      config.set_param_dtype(v1::DTYPE_F32);
      config.set_grad_dtype(v1::DTYPE_F32);
      config.set_group(group);
    }
    request.mutable_newton_schulz()->set_form(v1::NS_FORM_GRAM);
    request.mutable_newton_schulz()->set_steps(5);
    request.set_nesterov(true);
    request.set_adjust_lr(v1::ADJUST_LR_MATCH_RMS_ADAMW);
    request.set_nonfinite(v1::NONFINITE_SKIP);
    return request;
  }

  // Opens and configures a session of one rank.
  uint64_t OpenAndConfigure(const Attached& attached, const std::string& job) {
    v1::OpenSessionResponse opened;
    const grpc::Status open =
        trainer_->OpenSession(Context(attached.token).get(), OpenRequest(job), &opened);
    EXPECT_TRUE(open.ok()) << open.error_message();
    v1::ConfigureGroupsResponse configured;
    const grpc::Status configure = trainer_->ConfigureGroups(
        Context(attached.token).get(), ConfigureRequest(opened.session_id()), &configured);
    EXPECT_TRUE(configure.ok()) << configure.error_message();
    configured_ = configured;
    return opened.session_id();
  }

  grpc::Status Register(const Attached& attached, uint64_t session) {
    v1::RegisterBuffersRequest request;
    request.set_session_id(session);
    const auto add = [&](v1::BufferKind kind, uint64_t bytes) {
      v1::Buffer& buffer = *request.add_buffers();
      buffer.set_kind(kind);
      buffer.set_size(bytes);
    };
    add(v1::BUFFER_KIND_CONTROL, configured_.control_bytes());
    add(v1::BUFFER_KIND_GRAD, configured_.grad_bytes());
    add(v1::BUFFER_KIND_WEIGHT, configured_.weight_bytes());
    v1::RegisterBuffersResponse response;
    return trainer_->RegisterBuffers(Context(attached.token).get(), request, &response);
  }

  const dmuon::testing::TemporaryDirectory dir_{0755};
  const std::string socket_ = dir_.path() + "/control.sock";
  std::atomic<int> drains_{0};
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<SessionTable> table_;
  Attachments attachments_;
  std::unique_ptr<TrainerService> trainer_service_;
  std::unique_ptr<AdminService> admin_service_;
  std::unique_ptr<GrpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Trainer::Stub> trainer_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  v1::ConfigureGroupsResponse configured_;
};

}  // namespace dmuon::server::rpc

#endif  // DMUON_TESTS_SERVER_RPC_SERVICES_FIXTURE_H_
