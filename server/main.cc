// dmuond: reads what it is asked, makes a daemon, runs it.
#include <fcntl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "server/daemon/calibrate.h"
#include "server/daemon/command_line.h"
#include "server/daemon/config.h"
#include "server/daemon/daemon.h"
#include "server/daemon/exit_codes.h"

extern char** environ;

namespace dmuon::server {
namespace {

std::map<std::string, std::string> Environment() {
  std::map<std::string, std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (const size_t at = text.find('='); at != std::string::npos)
      result[text.substr(0, at)] = text.substr(at + 1);
  }
  return result;
}

void SetLog(const config::v1::Config& config) {
  const std::string& level = config.log_level();
  SetLogLevel(level == "debug"     ? LogLevel::kDebug
              : level == "warning" ? LogLevel::kWarning
              : level == "error"   ? LogLevel::kError
                                   : LogLevel::kInfo);
  SetLogFormat(config.log_format() == "json" ? LogFormat::kJson : LogFormat::kText);
}

// They are read from a descriptor. REQUIRES: no thread was started yet, so that all inherit the mask.
UniqueFd TakeSignals(std::initializer_list<int> signals) {
  signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  for (int number : signals) sigaddset(&set, number);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return UniqueFd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

// Whoever waits for "ready" at another descriptor than he named would wait forever. REQUIRES: nothing was opened yet
// that could have taken its number.
absl::Status CheckReady(int fd) {
  if (fd < 0) return absl::OkStatus();
  const int flags = fcntl(fd, F_GETFL);
  if (flags >= 0 && (flags & O_ACCMODE) != O_RDONLY) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--ready-fd: expected an open descriptor that can be written, given ", fd,
                   flags < 0 ? ", which is not open" : ", which can be read only"));
}

bool TellReady(int fd) {
  if (fd < 0) return true;
  constexpr char kReady[] = "ready\n";
  const bool told = write(fd, kReady, sizeof(kReady) - 1) == sizeof(kReady) - 1;
  close(fd);
  return told;
}

// What was printed comes first, also where both go to one file.
ExitCode Fail(ExitCode code, const absl::Status& status) {
  std::fflush(stdout);
  std::fprintf(stderr, "dmuond: %s\n", std::string(status.message()).c_str());
  return code;
}

// An answer that nobody got is none.
ExitCode Printed(ExitCode code) {
  const bool whole = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (whole || code != ExitCode::kOk) return code;
  return Fail(ExitCode::kFailed,
              absl::DataLossError("cannot write to standard output: the answer is not complete"));
}

bool IsIgnored(int number) {
  struct sigaction now;
  return sigaction(number, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

ExitCode Serve(const LoadedConfig& loaded, int ready_fd) {
  SetLog(loaded.config);
  for (const std::string& warning : loaded.warnings)
    Log(LogLevel::kWarning, "configuration", {{"warning", warning}});
  const UniqueFd signals = TakeSignals({SIGINT, SIGTERM});
  Daemon daemon(loaded.config);
  if (const std::optional<Daemon::Failure> failure = daemon.Start(); failure.has_value()) {
    return Fail(failure->code, failure->status);
  }
  if (!TellReady(ready_fd))
    Log(LogLevel::kWarning, "ready_fd", {{"error", "cannot be written"}, {"fd", ready_fd}});
  return daemon.Run(signals.get());
}

ExitCode Calibrate(const LoadedConfig& loaded) {
  SetLog(loaded.config);
  // Whatever ends it, its temporary file goes; under nohup it goes on.
  const UniqueFd signals =
      TakeSignals({SIGINT, SIGTERM, SIGQUIT, IsIgnored(SIGHUP) ? SIGTERM : SIGHUP});
  const absl::Status status = RunCalibration(loaded.config, signals.get());
  return status.ok() ? Printed(ExitCode::kOk) : Fail(ExitCode::kFailed, status);
}

ExitCode Main(int argc, char** argv) {
  const CommandLine line = ParseCommandLine(argc, argv);
  if (line.action == CommandLine::Action::kExit) {
    std::fputs(line.text.c_str(), line.exit_code == 0 ? stdout : stderr);
    return Printed(static_cast<ExitCode>(line.exit_code));
  }
  if (const absl::Status ready = CheckReady(line.ready_fd); !ready.ok())
    return Fail(ExitCode::kUsage, ready);
  const absl::StatusOr<LoadedConfig> loaded =
      LoadConfig({.file = line.config, .environment = Environment(), .flags = line.flags});
  if (!loaded.ok()) return Fail(ExitCode::kConfiguration, loaded.status());
  if (line.action == CommandLine::Action::kPrintConfig)
    std::fputs(PrintConfig(*loaded).c_str(), stdout);
  if (line.action == CommandLine::Action::kCalibrate) return Calibrate(*loaded);
  if (line.action != CommandLine::Action::kRun) {
    for (const std::string& warning : loaded->warnings)
      std::fprintf(stderr, "dmuond: warning: %s\n", warning.c_str());
    return Printed(ExitCode::kOk);
  }
  return Serve(*loaded, line.ready_fd);
}

}  // namespace
}  // namespace dmuon::server

int main(int argc, char** argv) {
  std::set_terminate([] {
    dmuon::Log(dmuon::LogLevel::kError, "internal_error", {{"error", "uncaught exception"}});
    _exit(static_cast<int>(dmuon::server::ExitCode::kInternal));
  });
  return static_cast<int>(dmuon::server::Main(argc, argv));
}
