#include "tests/server/daemon/daemon_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

extern char** environ;

namespace dmuon::server {
namespace {

constexpr int kReadyFd = 9;

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

DaemonProcess::DaemonProcess(std::vector<std::string> arguments,
                             std::vector<std::string> environment) {
  int pipe_fds[2];
  if (pipe2(pipe_fds, O_CLOEXEC) != 0) std::abort();
  ready_.Reset(pipe_fds[0]);
  const UniqueFd write_end(pipe_fds[1]);
  output_.Reset(memfd_create("output", MFD_CLOEXEC));
  arguments.insert(arguments.begin(), DMUOND);
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "DMUOND_", 7) != 0) environment.emplace_back(*entry);
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output_.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, output_.get(), 2);
  posix_spawn_file_actions_adddup2(&actions, write_end.get(), kReadyFd);
  if (posix_spawn(&pid_, DMUOND, &actions, nullptr, Pointers(arguments).data(),
                  Pointers(environment).data()) != 0) {
    std::abort();
  }
  posix_spawn_file_actions_destroy(&actions);
}

DaemonProcess::~DaemonProcess() {
  if (ended_) return;
  kill(pid_, SIGKILL);
  Wait();
}

bool DaemonProcess::Ready() {
  char text[8] = {};
  size_t length = 0;
  while (length < 6) {
    const ssize_t n = read(ready_.get(), text + length, 6 - length);
    if (n <= 0 && !(n < 0 && errno == EINTR)) break;
    if (n > 0) length += static_cast<size_t>(n);
  }
  return std::strcmp(text, "ready\n") == 0;
}

void DaemonProcess::Signal(int number) { kill(pid_, number); }

int DaemonProcess::Wait() {
  if (ended_) return code_;
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  ended_ = true;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return code_;
}

std::string DaemonProcess::Output() {
  std::string text(static_cast<size_t>(lseek(output_.get(), 0, SEEK_END)), 0);
  const ssize_t length = pread(output_.get(), text.data(), text.size(), 0);
  text.resize(length > 0 ? static_cast<size_t>(length) : 0);
  return text;
}

}  // namespace dmuon::server
