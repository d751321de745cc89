#include "server/rpc/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "dmuon/v1/admin.grpc.pb.h"
#include "dmuon/v1/trainer.grpc.pb.h"

namespace dmuon::server::rpc {
namespace {

constexpr int kMaxMessageBytes = 16 << 20;
constexpr int kAcceptPauseMs = 100;  // while there are no descriptors left

std::unique_ptr<grpc::Server> Build(const std::vector<grpc::Service*>& services) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // At least one thread always polls: when it takes a call, another is made before the handler runs.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 4);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 128);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  for (grpc::Service* service : services) builder.RegisterService(service);
  return builder.BuildAndStart();
}

ino_t InodeOf(int fd) {
  struct stat found;
  return fstat(fd, &found) == 0 ? found.st_ino : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(UniqueFd listener,
                                                              std::vector<grpc::Service*> services,
                                                              GrpcServerOptions options) {
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  std::unique_ptr<GrpcServer> server(
      new GrpcServer(std::move(listener), std::move(stop), std::move(options)));
  server->server_ = Build(services);
  if (server->server_ == nullptr) return absl::InternalError("gRPC did not start");
  server->SetServing(true);
  server->thread_ = std::thread([raw = server.get()] { raw->Accept(); });
  return server;
}

GrpcServer::GrpcServer(UniqueFd listener, UniqueFd stop, GrpcServerOptions options)
    : listener_(std::move(listener)), stop_(std::move(stop)), options_(std::move(options)) {}

GrpcServer::~GrpcServer() { Stop(absl::InfinitePast()); }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface& health = *server_->GetHealthCheckService();
  for (const char* name : {v1::Trainer::service_full_name(), v1::Admin::service_full_name()}) {
    health.SetServingStatus(name, serving);
  }
  health.SetServingStatus(serving);
}

void GrpcServer::Stop(absl::Time deadline) {
  if (thread_.joinable()) {
    eventfd_write(stop_.get(), 1);
    thread_.join();
    listener_.Reset();
  }
  if (server_ != nullptr)
    server_->Shutdown(absl::ToChronoTime(std::max(deadline, absl::UnixEpoch())));
}

void GrpcServer::Accept() {
  pthread_setname_np(pthread_self(), "dmuond-control");
  for (;;) {
    pollfd watched[] = {{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    if (poll(watched, 2, -1) < 0 && errno != EINTR) {
      Log(LogLevel::kError, "control_poll_failed",
          {{"error", absl::ErrnoToStatus(errno, "poll").message()}});
      return;
    }
    if (watched[0].revents != 0) return;
    if (watched[1].revents != 0) AcceptOne();
  }
}

void GrpcServer::AcceptOne() {
  // gRPC needs a descriptor that does not block: with one that does, the first call hangs.
  UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      if (!std::exchange(accept_fails_, true)) {  // it is tried ten times a second
        Log(LogLevel::kError, "control_accept_failed",
            {{"error", absl::ErrnoToStatus(errno, "accept4").message()}});
      }
      pollfd stop = {stop_.get(), POLLIN, 0};
      poll(&stop, 1, kAcceptPauseMs);
    }
    return;
  }
  if (std::exchange(accept_fails_, false)) Log(LogLevel::kInfo, "control_accept_resumed", {});
  const absl::StatusOr<PeerCredentials> peer = ReadPeerCredentials(fd.get());
  if (!peer.ok() || !options_.uids.Allows(peer->uid)) {
    Log(LogLevel::kWarning, "control_refused",
        {{"uid", peer.ok() ? static_cast<int64_t>(peer->uid) : -1},
         {"reason", "uid is not allowed"}});
    return;
  }
  if (!HasRoom(peer->uid)) {
    Log(LogLevel::kWarning, "control_refused",
        {{"uid", peer->uid}, {"reason", "too many connections"}});
    return;
  }
  given_[fd.get()] = Given{peer->uid, InodeOf(fd.get())};
  grpc::AddInsecureChannelFromFd(server_.get(), fd.Release());
}

// gRPC does not tell when it closes a descriptor. What it closed is looked for when a user comes near the limit.
bool GrpcServer::HasRoom(uid_t uid) {
  const auto of_uid = [&] {
    return std::count_if(given_.begin(), given_.end(),
                         [uid](const auto& g) { return g.second.uid == uid; });
  };
  if (of_uid() < options_.max_connections_per_uid) return true;
  std::erase_if(given_, [](const auto& g) { return InodeOf(g.first) != g.second.inode; });
  return of_uid() < options_.max_connections_per_uid;
}

}  // namespace dmuon::server::rpc
