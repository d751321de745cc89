#include "server/daemon/daemon.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/gpu.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "server/daemon/calibrate.h"
#include "server/daemon/config.h"
#include "server/daemon/cores.h"
#include "server/daemon/notify.h"

namespace dmuon::server {
namespace {

constexpr mode_t kSocketMode = 0660;  // who may reach them is the directory's mode
constexpr absl::Duration kCallsAfterDrain = absl::Seconds(1);
constexpr absl::Duration kBetweenLooks = absl::Seconds(1);
// What is closed at the end has deadlines of its own, and is given twice the longest.
constexpr absl::Duration kPatienceAtEnd = absl::Seconds(20);

// Each attachment holds a few descriptors; the usual soft limit is 1024.
void RaiseDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

std::string RandomId() {
  uint64_t id = 0;
  [[maybe_unused]] const ssize_t n = getrandom(&id, sizeof(id), 0);
  return absl::StrCat(absl::Hex(id, absl::kZeroPad16));
}

UidPolicy AllowedUids(const config::v1::Config& config) {
  return UidPolicy(std::vector<uid_t>(config.allow_uids().begin(), config.allow_uids().end()));
}

SessionLimits Limits(const config::v1::Config& config) {
  SessionLimits limits;
  limits.formation_timeout = absl::Seconds(config.formation_timeout_seconds());
  limits.step_timeout = absl::Seconds(config.step_timeout_seconds());
  limits.exchange_timeout = absl::Seconds(config.exchange_timeout_seconds());
  limits.max_sessions = static_cast<int>(config.max_sessions());
  limits.max_session_bytes = config.max_session_bytes();
  return limits;
}

rpc::AttachmentCalls CallsOf(Attachments& attachments, SessionTable& table) {
  return {
      .begin = [&attachments](absl::string_view token) { return attachments.BeginCall(token); },
      .end =
          [&attachments, &table](AttachmentId id) {
            if (!attachments.EndCall(id)) table.OnTrainerGone(id);
          },
      .entered = [&attachments](AttachmentId id,
                                SessionId session) { attachments.Entered(id, session); },
      .left = [&attachments](AttachmentId id, SessionId session) { attachments.Left(id, session); },
  };
}

}  // namespace

Daemon::Daemon(const config::v1::Config& config, absl::Duration first_attachment)
    : config_(config),
      first_attachment_(first_attachment),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Daemon::~Daemon() {
  if (drain_thread_.joinable()) drain_thread_.join();
}

std::optional<Daemon::Failure> Daemon::Start() {
  RaiseDescriptorLimit();
  absl::StatusOr<SocketDir> dir = SocketDir::Acquire(config_.socket_dir(), SocketMode(config_));
  if (!dir.ok()) return Failure{ExitCode::kSocketDir, Annotate(dir.status(), "socket_dir")};
  dir_.emplace(*std::move(dir));

  const Threads threads = ThreadsFor(static_cast<int>(config_.threads()), UsableCores());
  if (!threads.warning.empty())
    Log(LogLevel::kWarning, "configuration", {{"warning", threads.warning}});
  absl::StatusOr<std::unique_ptr<kernels::Backend>> backend =
      kernels::CreateBackend(config_.backend(), threads.count);
  if (!backend.ok()) return Failure{ExitCode::kBackend, Annotate(backend.status(), "backend")};
  backend_ = *std::move(backend);

  const CostSource costs = LoadCosts(config_.calibration_file(), *backend_, threads.count);
  Log(costs.refused ? LogLevel::kWarning : LogLevel::kInfo, "costs", {{"by", costs.text}});

  table_ = std::make_unique<SessionTable>(*backend_, Limits(config_), costs.table);
  trainer_service_ = std::make_unique<rpc::TrainerService>(*table_, CallsOf(attachments_, *table_),
                                                           config_.socket_dir());
  admin_service_ = std::make_unique<rpc::AdminService>(
      *table_, Info(threads.count, costs.text),
      std::vector<uid_t>(config_.admin_uids().begin(), config_.admin_uids().end()), [this] {
        drain_requested_ = true;
        Wake();
      });
  if (std::optional<Failure> failure = Serve(); failure.has_value()) return failure;

  Log(LogLevel::kInfo, "daemon_ready",
      {{"version", DMUON_VERSION},
       {"pid", getpid()},
       {"socket_dir", config_.socket_dir()},
       {"backend", BackendText()}});
  NotifySystemd("READY=1\nSTATUS=serving");
  return std::nullopt;
}

// Both sockets are bound before either accepts: a client that finds one finds the other.
std::optional<Daemon::Failure> Daemon::Serve() {
  absl::StatusOr<UniqueFd> control = ListenUnix(dir_->control_path(), SOCK_STREAM, kSocketMode);
  if (!control.ok()) return Failure{ExitCode::kSocketDir, Annotate(control.status(), "socket_dir")};
  absl::StatusOr<UniqueFd> attach = ListenUnix(dir_->attach_path(), SOCK_SEQPACKET, kSocketMode);
  if (!attach.ok()) return Failure{ExitCode::kSocketDir, Annotate(attach.status(), "socket_dir")};

  absl::StatusOr<std::unique_ptr<rpc::GrpcServer>> grpc = rpc::GrpcServer::Start(
      *std::move(control), {trainer_service_.get(), admin_service_.get(), &peer_service_},
      {.uids = AllowedUids(config_)});
  if (!grpc.ok()) return Failure{ExitCode::kFailed, grpc.status()};
  grpc_ = *std::move(grpc);

  AttachHandlers handlers;
  handlers.arena = [this](const Trainer& trainer, SessionId session, int rank,
                          wire::ArenaKind kind) {
    return table_->Arena(trainer, session, rank, kind);
  };
  handlers.gone = [this](AttachmentId attachment) {
    table_->OnTrainerGone(attachment);
    attachment_ended_ = true;
    Wake();
  };
  absl::StatusOr<std::unique_ptr<AttachServer>> server = AttachServer::Start(
      *std::move(attach), attachments_,
      {.uids = AllowedUids(config_), .daemon_version = DMUON_VERSION}, std::move(handlers));
  if (!server.ok()) return Failure{ExitCode::kFailed, server.status()};
  attach_ = *std::move(server);
  return std::nullopt;
}

// A device's processes take turns, or run beside each other under MPS: what a trainer sees of this daemon depends on it.
std::string Daemon::BackendText() const {
  if (!backend_->shares_by_handle()) return backend_->description();
  return absl::StrCat(backend_->description(), "; shared with trainers by ",
                      UsesMps() ? "MPS" : "time slices");
}

rpc::DaemonInfo Daemon::Info(int threads, const std::string& costs) const {
  return {.version = DMUON_VERSION,
          .instance_id = RandomId(),
          .started = absl::Now(),
          .backend = std::string(backend_->name()),
          .kernel = BackendText(),
          .threads = threads,
          .socket_dir = config_.socket_dir(),
          .costs = costs};
}

bool Daemon::Idle(absl::Time started) const {
  if (!config_.exit_when_idle() || attachments_.size() > 0) return false;
  return attachment_ended_ || absl::Now() >= started + first_attachment_;
}

ExitCode Daemon::Run(int signals) {
  const absl::Time started = absl::Now();
  if (backend_->shares_by_handle()) device_thread_ = std::thread([this] { WatchDevices(); });
  while (!drained_) {
    // Whoever has attached by then is waited for without a timeout.
    const int64_t ms = absl::ToInt64Milliseconds(started + first_attachment_ - absl::Now()) + 1;
    const bool waits_for_first = config_.exit_when_idle() && !draining_ && ms > 0;
    pollfd watched[] = {{signals, POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    poll(watched, 2, waits_for_first ? static_cast<int>(std::min<int64_t>(ms, INT_MAX)) : -1);
    eventfd_t count;
    eventfd_read(wake_.get(), &count);
    signalfd_siginfo signal;
    while (read(signals, &signal, sizeof(signal)) == sizeof(signal)) {
      if (draining_) CutShort("second signal");
      BeginDrain(strsignal(static_cast<int>(signal.ssi_signo)),
                 absl::Seconds(config_.drain_timeout_seconds()));
    }
    if (drain_requested_ && !draining_) {
      BeginDrain("admin", absl::Seconds(config_.drain_timeout_seconds()));
    } else if (!draining_ && Idle(started)) {
      BeginDrain("idle", absl::ZeroDuration());
    } else if (!draining_ && device_failed_) {
      ends_with_ = ExitCode::kFailed;
      BeginDrain("a device has failed", absl::ZeroDuration());
    }
  }
  drain_thread_.join();
  last_resort_.Arm(signals, kPatienceAtEnd, [this](bool signalled) {
    CutShort(signalled ? "second signal" : "a call into a driver does not come back");
  });
  ending_.Notify();
  if (device_thread_.joinable()) device_thread_.join();
  grpc_->Stop(absl::Now() + kCallsAfterDrain);
  attach_.reset();
  dir_.reset();
  Log(LogLevel::kInfo, "daemon_ended", {{"pid", getpid()}});
  return ends_with_;
}

// What a kernel has broken stays broken for the process, and a new process is all that helps.
void Daemon::WatchDevices() {
  while (!ending_.WaitForNotificationWithTimeout(kBetweenLooks)) {
    const absl::Status health = backend_->Health();
    if (health.ok()) continue;
    Log(LogLevel::kError, "device_failed", {{"reason", health.message()}});
    device_failed_ = true;
    Wake();
    return;
  }
}

void Daemon::BeginDrain(absl::string_view reason, absl::Duration patience) {
  draining_ = true;
  Log(LogLevel::kInfo, "drain_started",
      {{"reason", reason},
       {"sessions", table_->size()},
       {"timeout", absl::FormatDuration(patience)}});
  NotifySystemd("STOPPING=1\nSTATUS=draining");
  table_->StartDrain();
  grpc_->SetServing(false);
  drain_thread_ = std::thread([this, deadline = absl::Now() + patience] {
    table_->FinishDrain(deadline);
    drained_ = true;
    Wake();
  });
}

void Daemon::Wake() const { eventfd_write(wake_.get(), 1); }

void Daemon::CutShort(absl::string_view reason) {
  Log(LogLevel::kWarning, "drain_cut_short", {{"sessions", table_->size()}, {"reason", reason}});
  if (dir_.has_value()) dir_.reset();
  _exit(
      static_cast<int>(ExitCode::kFailed));  // threads are at work: nothing else can be taken down
}

}  // namespace dmuon::server
