// The composition root: makes everything that a daemon is, runs it until it is told to stop, takes it down in order.
#ifndef DMUON_SERVER_DAEMON_DAEMON_H_
#define DMUON_SERVER_DAEMON_DAEMON_H_

#include <atomic>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "dmuon/config/v1/config.pb.h"
#include "kernels/ops/backend.h"
#include "server/attach/attach_server.h"
#include "server/attach/attachments.h"
#include "server/daemon/exit_codes.h"
#include "server/daemon/last_resort.h"
#include "server/daemon/socket_dir.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/peer_service.h"
#include "server/rpc/trainer_service.h"
#include "server/session/session_table.h"

namespace dmuon::server {

class Daemon {
 public:
  // How long a daemon with exit_when_idle waits for its first attachment.
  static constexpr absl::Duration kFirstAttachment = absl::Seconds(60);

  struct Failure {
    ExitCode code = ExitCode::kFailed;
    absl::Status status;
  };

  explicit Daemon(const config::v1::Config& config,
                  absl::Duration first_attachment = kFirstAttachment);
  ~Daemon();
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  // After it both sockets accept. nullopt when all went well.
  std::optional<Failure> Start();

  // Serves until `signals` (a signalfd) says so, an admin drains, or an idle private daemon has nothing to do.
  // A first signal drains; a second does not return: it ends the process.
  ExitCode Run(int signals);

 private:
  std::optional<Failure> Serve();
  std::string BackendText() const;
  rpc::DaemonInfo Info(int threads, const std::string& costs) const;
  bool Idle(absl::Time started) const;
  void BeginDrain(absl::string_view reason, absl::Duration patience);
  void Wake() const;
  [[noreturn]] void CutShort(absl::string_view reason);
  // Until the end, on a thread of its own: asks now and then whether a device has failed for good.
  void WatchDevices();

  const config::v1::Config config_;
  const absl::Duration first_attachment_;
  UniqueFd wake_;  // eventfd: look again at the flags below
  std::atomic<bool> drain_requested_{false};
  std::atomic<bool> attachment_ended_{false};
  std::atomic<bool> drained_{false};
  std::atomic<bool> device_failed_{false};
  absl::Notification ending_;
  bool draining_ = false;  // of the thread in Run
  ExitCode ends_with_ = ExitCode::kOk;

  // In the order in which they are made; taken down the other way round.
  LastResort last_resort_;  // watches over the end of all that follows
  std::optional<SocketDir> dir_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<SessionTable> table_;
  Attachments attachments_;
  std::unique_ptr<rpc::TrainerService> trainer_service_;
  std::unique_ptr<rpc::AdminService> admin_service_;
  rpc::PeerService peer_service_;
  std::unique_ptr<rpc::GrpcServer> grpc_;
  std::unique_ptr<AttachServer> attach_;
  std::thread drain_thread_, device_thread_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_DAEMON_H_
