// The server itself, with services that block on purpose.
#include "server/rpc/grpc_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "dmuon/v1/admin.grpc.pb.h"
#include "dmuon/v1/trainer.grpc.pb.h"
#include "server/rpc/caller.h"
#include "server/rpc/peer_service.h"
#include "tests/server/rpc/raw_client.h"
#include "tests/support/process.h"

namespace dmuon::server::rpc {
namespace {

using dmuon::testing::Eventually;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

// OpenSession holds its thread until it is released; CloseSession answers the caller's uid in its error.
class BlockingTrainer final : public v1::Trainer::Service {
 public:
  grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest*,
                           v1::OpenSessionResponse*) override {
    peer_descriptor_ = PeerDescriptor(context->peer()).value_or(-1);
    ++inside_;
    while (!context->IsCancelled() && !release_.HasBeenNotified()) {
      release_.WaitForNotificationWithTimeout(absl::Milliseconds(5));
    }
    ++cancelled_;
    release_.WaitForNotification();
    return grpc::Status::OK;
  }
  grpc::Status CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest*,
                            v1::CloseSessionResponse*) override {
    return grpc::Status(grpc::StatusCode::ABORTED,
                        std::to_string(CallerUid(*context).value_or(4242)));
  }

  std::atomic<int> inside_{0};
  std::atomic<int> cancelled_{0};
  std::atomic<int> peer_descriptor_{-1};
  absl::Notification release_;
};

class PlainAdmin final : public v1::Admin::Service {
 public:
  grpc::Status GetInfo(grpc::ServerContext*, const v1::GetInfoRequest*,
                       v1::GetInfoResponse* response) override {
    response->set_pid(7);
    return grpc::Status::OK;
  }
};

bool HungUp(int fd) {
  pollfd watched = {fd, 0, 0};
  return poll(&watched, 1, 0) == 1 && (watched.revents & POLLHUP) != 0;
}

void SetDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
}

class GrpcServerTest : public ::testing::Test {
 protected:
  void Start(GrpcServerOptions options = {}) {
    auto listener = ListenUnix(socket_, SOCK_STREAM, 0666);
    ASSERT_TRUE(listener.ok()) << listener.status();
    auto server =
        GrpcServer::Start(*std::move(listener), {&trainer_, &admin_, &peer_}, std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  grpc::Status Close(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::CloseSessionResponse response;
    return v1::Trainer::NewStub(channel)->CloseSession(&context, {}, &response);
  }

  const dmuon::testing::TemporaryDirectory dir_{0755};
  const std::string socket_ = dir_.path() + "/control.sock";
  BlockingTrainer trainer_;
  PlainAdmin admin_;
  PeerService peer_;
  std::unique_ptr<GrpcServer> server_;
};

TEST_F(GrpcServerTest, ReflectionListsAllServices) {
  Start();
  const auto services = ListServices(Dial(socket_));
  ASSERT_TRUE(services.ok()) << services.status();
  EXPECT_THAT(*services,
              IsSupersetOf({"dmuon.v1.Trainer", "dmuon.v1.Admin", "dmuon.v1.Peer",
                            "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}));
}

TEST_F(GrpcServerTest, HealthAnswersForTheServerAndEachServiceAndFollowsTheDrain) {
  Start();
  const auto channel = Dial(socket_);
  for (const char* service : {"", "dmuon.v1.Trainer", "dmuon.v1.Admin"}) {
    const auto health = CheckHealth(channel, service);
    ASSERT_TRUE(health.ok()) << health.status();
    EXPECT_EQ(*health, Health::kServing) << service;
  }
  EXPECT_EQ(CheckHealth(channel, "nobody").status().code(), absl::StatusCode::kNotFound);
  server_->SetServing(false);
  EXPECT_EQ(CheckHealth(channel, "dmuon.v1.Trainer").value(), Health::kNotServing);
}

TEST_F(GrpcServerTest, SixtyFourBlockedCallsStarveNeitherHealthNorAdmin) {
  Start();
  constexpr int kCalls = 64;
  std::vector<std::thread> trainers;
  const auto channel = Dial(socket_);
  for (int i = 0; i < kCalls; ++i) {
    trainers.emplace_back([&] {
      grpc::ClientContext context;
      v1::OpenSessionResponse response;
      (void)v1::Trainer::NewStub(channel)->OpenSession(&context, {}, &response);
    });
  }
  EXPECT_TRUE(Eventually([&] { return trainer_.inside_ == kCalls; }));
  for (const auto& asking : {channel, Dial(socket_)}) {
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(CheckHealth(asking, "").value_or(Health::kUnknown), Health::kServing);
      grpc::ClientContext context;
      SetDeadline(context);
      v1::GetInfoResponse info;
      EXPECT_TRUE(v1::Admin::NewStub(asking)->GetInfo(&context, {}, &info).ok());
    }
  }
  EXPECT_EQ(trainer_.inside_, kCalls);
  trainer_.release_.Notify();
  for (std::thread& t : trainers) t.join();
}

TEST_F(GrpcServerTest, ADescriptorIsNotReusedWhileACallOfItsConnectionRuns) {
  Start();
  auto channel = Dial(socket_);
  auto context = std::make_unique<grpc::ClientContext>();
  std::thread caller([&] {
    v1::OpenSessionResponse response;
    (void)v1::Trainer::NewStub(channel)->OpenSession(context.get(), {}, &response);
  });
  ASSERT_TRUE(Eventually([&] { return trainer_.inside_ == 1; }));
  const int fd = trainer_.peer_descriptor_;
  struct stat before, now;
  ASSERT_EQ(fstat(fd, &before), 0);

  // The caller goes away, and its connection with it; the handler goes on.
  context->TryCancel();
  caller.join();
  context.reset();  // it holds the channel too
  channel.reset();
  ASSERT_TRUE(Eventually([&] { return trainer_.cancelled_ == 1 && HungUp(fd); }));
  for (int i = 0; i < 16; ++i)
    EXPECT_EQ(CheckHealth(Dial(socket_), "").value_or(Health::kUnknown), Health::kServing);
  ASSERT_EQ(fstat(fd, &now), 0);
  EXPECT_EQ(now.st_ino, before.st_ino);

  // And is closed after the call, so that nothing leaks.
  trainer_.release_.Notify();
  EXPECT_TRUE(Eventually([&] { return fstat(fd, &now) != 0 || now.st_ino != before.st_ino; }));
}

TEST_F(GrpcServerTest, CallersAreKnownByTheUidOfTheirConnection) {
  Start();
  EXPECT_EQ(Close(Dial(socket_)).error_message(), std::to_string(geteuid()));
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  EXPECT_EQ(Close(DialAs(4711, socket_)).error_message(), "4711");
}

TEST_F(GrpcServerTest, AUserWhoIsNotListedGetsNoConnection) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  Start({.uids = UidPolicy({4711})});
  EXPECT_EQ(Close(DialAs(4711, socket_)).error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(Close(DialAs(4712, socket_)).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(GrpcServerTest, ConnectionsOfOneUserHaveALimitAndThoseThatEndedDoNotCount) {
  Start({.max_connections_per_uid = 2});
  for (int i = 0; i < 10; ++i) {
    // One at a time: each is closed before the next, though the server may notice a little later.
    EXPECT_TRUE(Eventually([&] { return CheckHealth(Dial(socket_), "").ok(); }));
  }
  const auto a = Dial(socket_), b = Dial(socket_);
  EXPECT_TRUE(Eventually([&] { return CheckHealth(a, "").ok(); }));
  EXPECT_TRUE(Eventually([&] { return CheckHealth(b, "").ok(); }));
  EXPECT_EQ(CheckHealth(Dial(socket_), "").status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(GrpcServerTest, AMessageOverSixteenMebibytesIsRefused) {
  Start();
  v1::OpenSessionRequest request;
  request.set_client_uuid(std::string(17 << 20, 'x'));
  grpc::ClientContext context;
  SetDeadline(context);
  v1::OpenSessionResponse response;
  const grpc::Status status =
      v1::Trainer::NewStub(Dial(socket_))->OpenSession(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(trainer_.inside_, 0);
}

TEST_F(GrpcServerTest, PeerNamesItsRpcAsNotBuilt) {
  Start();
  grpc::ClientContext context;
  SetDeadline(context);
  v1::JoinResponse response;
  const grpc::Status status = v1::Peer::NewStub(Dial(socket_))->Join(&context, {}, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(status.error_message(), HasSubstr("dmuon.v1.Peer/Join"));
}

TEST_F(GrpcServerTest, GarbageOnTheSocketHarmsNobody) {
  Start();
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(4096, '\0'), std::string()}) {
    const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socket_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    (void)!send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  EXPECT_EQ(CheckHealth(Dial(socket_), "").value_or(Health::kUnknown), Health::kServing);
}

TEST_F(GrpcServerTest, StopCancelsCallsThatDoNotEnd) {
  Start();
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::OpenSessionResponse response;
    EXPECT_FALSE(v1::Trainer::NewStub(Dial(socket_))->OpenSession(&context, {}, &response).ok());
  });
  ASSERT_TRUE(Eventually([&] { return trainer_.inside_ == 1; }));
  std::thread stopper([&] { server_->Stop(absl::InfinitePast()); });
  EXPECT_TRUE(Eventually([&] { return trainer_.cancelled_ == 1; }));
  trainer_.release_.Notify();
  stopper.join();
  caller.join();
}

}  // namespace
}  // namespace dmuon::server::rpc
