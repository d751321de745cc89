#include "tests/support/process.h"

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace dmuon::testing {
namespace {

namespace fs = std::filesystem;

void Check(bool condition, const char* what) {
  if (condition) return;
  perror(what);
  abort();
}

[[noreturn]] void BecomeProgram(char* const* argv, const SpawnOptions& options, int out,
                                pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that dies leaves nothing behind
  if (getppid() != parent) _exit(125);
  dup2(out, STDOUT_FILENO);
  if (!options.stderr_path.empty()) {
    const int error = open(options.stderr_path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (error >= 0) dup2(error, STDERR_FILENO);
  }
  if (options.uid && (setgroups(0, nullptr) != 0 || setuid(*options.uid) != 0)) {
    _exit(126);
  }
  // Changing the uid clears it.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

std::string Program(const std::string& name) {
  return (fs::read_symlink("/proc/self/exe").parent_path() / name).string();
}

bool Eventually(absl::FunctionRef<bool()> condition, absl::Duration patience) {
  const absl::Time end = absl::Now() + patience;
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

ChildProcess::ChildProcess(const std::vector<std::string>& arguments, const SpawnOptions& options) {
  int ends[2];
  Check(pipe2(ends, O_CLOEXEC) == 0, "pipe2");
  stdout_.Reset(ends[0]);
  UniqueFd out(ends[1]);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  Check(pid_ >= 0, "fork");
  if (pid_ == 0) BecomeProgram(argv.data(), options, out.get(), parent);
}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(result_, other.result_);
  std::swap(stdout_, other.stdout_);
  std::swap(buffer_, other.buffer_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0) return;
  Signal(SIGKILL);
  Wait();
}

void ChildProcess::Signal(int signal) const {
  if (pid_ > 0 && result_ < 0) kill(pid_, signal);
}

bool ChildProcess::Fill() {
  pollfd watched{stdout_.get(), POLLIN, 0};
  if (poll(&watched, 1, static_cast<int>(absl::ToInt64Milliseconds(kPatience))) <= 0) return false;
  char chunk[4096];
  const ssize_t n = read(stdout_.get(), chunk, sizeof(chunk));
  if (n <= 0) return false;
  buffer_.append(chunk, static_cast<size_t>(n));
  return true;
}

std::optional<std::string> ChildProcess::ReadLine() {
  size_t end;
  while ((end = buffer_.find('\n')) == std::string::npos) {
    if (!Fill()) return std::nullopt;
  }
  std::string line = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  return line;
}

std::string ChildProcess::ReadAll() {
  while (Fill()) {
  }
  return std::move(buffer_);
}

int ChildProcess::Wait() {
  if (result_ >= 0) return result_;
  int status = 0;
  if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; })) {
    fprintf(stderr, "process %d did not end: killed\n", pid_);
    kill(pid_, SIGKILL);
    waitpid(pid_, &status, 0);
  }
  result_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result_;
}

ProcessUse UseOf(pid_t pid) {
  ProcessUse use;
  const std::string proc = absl::StrCat("/proc/", pid);
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(proc + "/fd")) ++use.descriptors;
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    ++use.mappings;
    use.memfd_mappings += absl::StrContains(line, "/memfd:");
  }
  std::ifstream statm(proc + "/statm");
  long size = 0, resident = 0;
  statm >> size >> resident;
  use.rss_kib = resident * (sysconf(_SC_PAGESIZE) / 1024);
  return use;
}

std::string DescriptorsOf(pid_t pid) {
  std::string out;
  for (const auto& entry : fs::directory_iterator(absl::StrCat("/proc/", pid, "/fd"))) {
    std::error_code gone;
    absl::StrAppend(&out, entry.path().filename().string(), " -> ",
                    fs::read_symlink(entry.path(), gone).string(), "\n");
  }
  return out;
}

TemporaryDirectory::TemporaryDirectory(mode_t mode) {
  char path[] = "/tmp/dmuon-e2e-XXXXXX";
  Check(mkdtemp(path) != nullptr, "mkdtemp");
  Check(chmod(path, mode) == 0, "chmod");
  path_ = path;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace dmuon::testing
