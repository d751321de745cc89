// dmuond from outside: a process, its sockets, its signals and how it ends.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dmuon/v1/admin.grpc.pb.h"
#include "proto/wire/attach_frame.h"
#include "server/daemon/cores.h"
#include "server/daemon/exit_codes.h"
#include "tests/support/process.h"

namespace dmuon::server {
namespace {

using dmuon::testing::ChildProcess;
using dmuon::testing::TemporaryDirectory;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

int Code(ExitCode code) { return static_cast<int>(code); }

// A dmuond that need not come up; tests/support/daemon_process.h is for those that must.
class Dmuond {
 public:
  // `environment`: NAME and value of what it has besides ours.
  Dmuond(std::vector<std::string> arguments, const std::string& log,
         const std::vector<std::pair<std::string, std::string>>& environment)
      : log_(log) {
    arguments.insert(arguments.begin(), DMUOND);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    process_ = ChildProcess(arguments, {.stderr_path = log});
    for (const auto& [name, value] : environment) unsetenv(name.c_str());
  }
  bool Ready() { return process_.ReadLine() == "ready"; }
  void Signal(int signal) { process_.Signal(signal); }
  int Wait() { return process_.Wait(); }
  std::string Stdout() { return process_.ReadAll(); }
  // What it wrote to stderr so far.
  std::string Output() {
    std::ifstream file(log_);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  pid_t pid() const { return process_.pid(); }

 private:
  std::string log_;
  ChildProcess process_;
};

class DaemonTest : public ::testing::Test {
 protected:
  std::string dir() const { return parent_.path() + "/run"; }
  std::unique_ptr<Dmuond> Daemon(
      std::vector<std::string> arguments = {},
      const std::vector<std::pair<std::string, std::string>>& environment = {}) {
    arguments.insert(arguments.end(), {"--socket-dir", dir(), "--ready-fd", "1", "--threads", "1"});
    arguments.insert(arguments.begin(), {"--calibration-file", ""});  // not this machine's
    return std::make_unique<Dmuond>(std::move(arguments),
                                    absl::StrCat(parent_.path(), "/log", ++started_), environment);
  }

  // An attachment of this process; -1 when there is none to be had.
  UniqueFd Attach() {
    UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = dir() + "/attach.sock";
    std::memcpy(address.sun_path, path.data(), path.size());
    wire::AttachFrame frame;
    frame.type = wire::AttachType::kHello;
    if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
        send(fd.get(), &frame, sizeof(frame), MSG_NOSIGNAL) < 0 ||
        recv(fd.get(), &frame, sizeof(frame), 0) <= 0 || frame.type != wire::AttachType::kWelcome) {
      return UniqueFd();
    }
    return fd;
  }

  std::unique_ptr<v1::Admin::Stub> Admin() {
    return v1::Admin::NewStub(
        grpc::CreateChannel("unix:" + dir() + "/control.sock", grpc::InsecureChannelCredentials()));
  }
  static void SetDeadline(grpc::ClientContext& context) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  v1::GetInfoResponse Info() {
    grpc::ClientContext context;
    SetDeadline(context);
    v1::GetInfoResponse info;
    const grpc::Status status = Admin()->GetInfo(&context, {}, &info);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return info;
  }

  TemporaryDirectory parent_;
  int started_ = 0;
};

TEST_F(DaemonTest, IsReadyWhenBothSocketsAcceptAndSaysWhatItIs) {
  const auto daemon = Daemon();
  ASSERT_TRUE(daemon->Ready()) << daemon->Output();
  EXPECT_TRUE(Attach().valid());
  const v1::GetInfoResponse info = Info();
  EXPECT_EQ(info.pid(), daemon->pid());
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_EQ(info.threads(), 1u);
  EXPECT_EQ(info.instance_id().size(), 16u);
  EXPECT_EQ(info.socket_dir(), dir());
}

TEST_F(DaemonTest, MoreThreadsThanCoresAreCutDownToThemWithAWarning) {
  Dmuond daemon(
      {"--calibration-file", "", "--socket-dir", dir(), "--ready-fd", "1", "--threads", "4096"},
      parent_.path() + "/log", {});
  ASSERT_TRUE(daemon.Ready()) << daemon.Output();
  EXPECT_EQ(static_cast<int>(Info().threads()), std::min(UsableCores(), 4096));
  EXPECT_THAT(daemon.Output(), HasSubstr("4096 asked for"));
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), Code(ExitCode::kOk));
}

TEST_F(DaemonTest, SaysWhetherCostsAreMeasuredAndStartsWhateverTheFileIs) {
  const auto by = [&](const std::string& file) {
    const auto daemon = Daemon({"--calibration-file", file});
    EXPECT_TRUE(daemon->Ready()) << daemon->Output();
    EXPECT_THAT(daemon->Output(), HasSubstr(" costs by="));
    return Info().costs();
  };
  const std::string file = parent_.path() + "/calibration.json";
  EXPECT_EQ(by(""), "flops: calibration_file is empty");
  EXPECT_THAT(by(file), HasSubstr("flops: no "));
  std::ofstream(file) << "{";
  EXPECT_THAT(by(file), HasSubstr("flops: " + file + ": expected a calibration"));
  std::ofstream(file) << "\x7f"
                      << "ELF\xff\xfe\n";
  EXPECT_THAT(by(file), HasSubstr("given '\\x7f\\x45LF\\xff\\xfe\\n'"));
}

TEST_F(DaemonTest, AnInterruptedCalibrationLeavesTheFileAsItWas) {
  const std::string file = parent_.path() + "/calibration.json";
  std::ofstream(file) << "as it was";
  const auto daemon = Daemon({"--calibrate", "--calibration-file", file});
  daemon->Signal(SIGINT);
  EXPECT_NE(daemon->Wait(), Code(ExitCode::kOk));
  std::ifstream kept(file);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(kept), {}), "as it was");
  EXPECT_FALSE(fs::exists(dir())) << "it needs no sockets";
  for (const auto& entry : fs::directory_iterator(parent_.path()))
    EXPECT_FALSE(absl::StartsWith(entry.path().filename().string(), "calibration.json."));
}

TEST_F(DaemonTest, SignalsDrainAndLeaveNothingBehind) {
  for (int signal : {SIGTERM, SIGINT}) {
    const auto daemon = Daemon();
    ASSERT_TRUE(daemon->Ready()) << daemon->Output();
    const UniqueFd attachment = Attach();
    daemon->Signal(signal);
    EXPECT_EQ(daemon->Wait(), Code(ExitCode::kOk)) << daemon->Output();
    EXPECT_FALSE(fs::exists(dir()));
    EXPECT_THAT(daemon->Output(), HasSubstr("drain_started"));
    EXPECT_THAT(daemon->Output(), HasSubstr("daemon_ended"));
  }
}

TEST_F(DaemonTest, ASecondSignalEndsItAtOnceWithItsOwnCode) {
  const auto daemon = Daemon();
  ASSERT_TRUE(daemon->Ready()) << daemon->Output();
  // Both are pending when it looks: it must not end the drain in between.
  daemon->Signal(SIGSTOP);
  int status;
  ASSERT_EQ(waitpid(daemon->pid(), &status, WUNTRACED), daemon->pid());
  daemon->Signal(SIGTERM);
  daemon->Signal(SIGINT);
  daemon->Signal(SIGCONT);
  EXPECT_EQ(daemon->Wait(), Code(ExitCode::kFailed)) << daemon->Output();
  EXPECT_THAT(daemon->Output(), HasSubstr("drain_cut_short"));
  EXPECT_FALSE(fs::exists(dir()));
}

TEST_F(DaemonTest, AnAdminDrains) {
  const auto daemon = Daemon();
  ASSERT_TRUE(daemon->Ready()) << daemon->Output();
  grpc::ClientContext context;
  SetDeadline(context);
  v1::DrainResponse response;
  const grpc::Status status = Admin()->Drain(&context, {}, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(daemon->Wait(), Code(ExitCode::kOk)) << daemon->Output();
}

TEST_F(DaemonTest, ASecondDaemonInTheSameDirectoryIsRefusedAndTheFirstGoesOn) {
  const auto first = Daemon();
  ASSERT_TRUE(first->Ready()) << first->Output();
  const auto second = Daemon();
  EXPECT_FALSE(second->Ready());
  EXPECT_EQ(second->Wait(), Code(ExitCode::kSocketDir));
  EXPECT_THAT(second->Output(), HasSubstr(absl::StrCat("another dmuond is alive in ", dir(),
                                                       ", pid ", first->pid())));
  EXPECT_EQ(Info().pid(), first->pid());
}

TEST_F(DaemonTest, WhatAKilledDaemonLeftIsReplaced) {
  const auto first = Daemon();
  ASSERT_TRUE(first->Ready()) << first->Output();
  first->Signal(SIGKILL);
  EXPECT_EQ(first->Wait(), 128 + SIGKILL);
  ASSERT_TRUE(fs::exists(dir() + "/attach.sock"));
  const auto second = Daemon();
  ASSERT_TRUE(second->Ready()) << second->Output();
  EXPECT_EQ(Info().pid(), second->pid());
}

TEST_F(DaemonTest, APrivateDaemonEndsWithItsLastAttachment) {
  const auto daemon = Daemon({"--exit-when-idle"});
  ASSERT_TRUE(daemon->Ready()) << daemon->Output();
  UniqueFd first = Attach(), second = Attach();
  ASSERT_TRUE(first.valid() && second.valid());
  first.Reset();
  EXPECT_EQ(Info().pid(), daemon->pid());
  second.Reset();
  EXPECT_EQ(daemon->Wait(), Code(ExitCode::kOk)) << daemon->Output();
  EXPECT_THAT(daemon->Output(), HasSubstr("reason=idle"));
  EXPECT_FALSE(fs::exists(dir()));
}

TEST_F(DaemonTest, EachWayOfNotStartingHasItsCodeAndItsReason) {
  const auto expect = [&](const std::vector<std::string>& arguments, ExitCode code,
                          const std::string& text) {
    const auto daemon = Daemon(arguments);
    EXPECT_FALSE(daemon->Ready());
    EXPECT_EQ(daemon->Wait(), Code(code)) << daemon->Output();
    EXPECT_THAT(daemon->Output(), HasSubstr(text));
  };
  expect({"--no-such-flag"}, ExitCode::kUsage, "--no-such-flag");
  expect({"--max-sessions", "none"}, ExitCode::kConfiguration,
         "max_sessions: expected an unsigned integer");
  expect({"--listen", "1.2.3.4:5"}, ExitCode::kConfiguration, "listen");
  std::ofstream(parent_.path() + "/bad.yaml") << "log_level: info\nlog_fromat: json\n";
  expect({"--config", parent_.path() + "/bad.yaml"}, ExitCode::kConfiguration,
         "bad.yaml:2: unknown key 'log_fromat'");
  std::ofstream(dir()) << "a file";
  expect({}, ExitCode::kSocketDir, "not a directory");
}

TEST_F(DaemonTest, ADescriptorThatCannotHearReadyIsRefusedBeforeTheStart) {
  for (const std::string fd : {"99", "9"}) {
    ChildProcess process({"/bin/sh", "-c",
                          absl::StrCat("exec ", DMUOND, " --socket-dir ", dir(), " --ready-fd ", fd,
                                       " 9</dev/null")},
                         {.stderr_path = parent_.path() + "/log"});
    EXPECT_EQ(process.Wait(), Code(ExitCode::kUsage));
    std::ifstream said(parent_.path() + "/log");
    EXPECT_THAT(
        std::string(std::istreambuf_iterator<char>(said), {}),
        HasSubstr("--ready-fd: expected an open descriptor that can be written, given " + fd));
    EXPECT_FALSE(fs::exists(dir()));
  }
}

TEST_F(DaemonTest, PrintAndCheckOfTheConfigurationStartNothing) {
  const auto print = Daemon({"--print-config"}, {{"DMUOND_LOG_LEVEL", "error"}});
  const std::string printed = print->Stdout();
  EXPECT_EQ(print->Wait(), 0);
  EXPECT_THAT(printed, ContainsRegex("log_level: error +# env DMUOND_LOG_LEVEL"));
  EXPECT_THAT(printed, ContainsRegex("threads: 1 +# flag"));
  const auto check = Daemon({"--check-config"});
  EXPECT_EQ(check->Wait(), 0);
  EXPECT_EQ(check->Stdout() + check->Output(), "");
  EXPECT_FALSE(fs::exists(dir()));
}

TEST_F(DaemonTest, AnAnswerThatCannotBePrintedIsAFailure) {
  const std::string log = parent_.path() + "/log";
  for (const std::string action : {"--print-config", "--help", "--version", "--calibrate"}) {
    ChildProcess process(
        {"/bin/sh", "-c",
         absl::StrCat("exec ", DMUOND, " --threads 1 --calibration-file ", parent_.path(),
                      "/calibration.json ", action, " >/dev/full")},
        {.stderr_path = log});
    EXPECT_EQ(process.Wait(), Code(ExitCode::kFailed)) << action;
    std::ifstream said(log);
    EXPECT_THAT(std::string(std::istreambuf_iterator<char>(said), {}), HasSubstr("standard output"))
        << action;
  }
}

TEST_F(DaemonTest, SystemdHearsReadyAndStopping) {
  const std::string path = parent_.path() + "/notify.sock";
  const UniqueFd notify(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(bind(notify.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const auto daemon = Daemon({}, {{"NOTIFY_SOCKET", path}});
  const auto heard = [&] {
    char text[256];
    const ssize_t length = recv(notify.get(), text, sizeof(text), 0);
    return std::string(text, length > 0 ? static_cast<size_t>(length) : 0);
  };
  EXPECT_THAT(heard(), HasSubstr("READY=1"));
  daemon->Signal(SIGTERM);
  EXPECT_THAT(heard(), HasSubstr("STOPPING=1"));
  EXPECT_EQ(daemon->Wait(), 0);
}

TEST_F(DaemonTest, ALogOfJsonIsOneObjectALine) {
  const auto daemon = Daemon({"--log-format", "json"});
  ASSERT_TRUE(daemon->Ready()) << daemon->Output();
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0);
  EXPECT_THAT(daemon->Output(), HasSubstr("\"event\":\"daemon_ready\""));
}

}  // namespace
}  // namespace dmuon::server
