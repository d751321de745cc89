// A dmuond of the test's own, as a process.
#ifndef DMUON_TESTS_SERVER_DAEMON_DAEMON_PROCESS_H_
#define DMUON_TESTS_SERVER_DAEMON_DAEMON_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace dmuon::server {

class DaemonProcess {
 public:
  // Starts it; does not wait. `environment` entries are NAME=value.
  explicit DaemonProcess(std::vector<std::string> arguments,
                         std::vector<std::string> environment = {});
  ~DaemonProcess();  // kills it, if it runs

  // Whether it said "ready" before it ended.
  bool Ready();
  void Signal(int number);
  // Its exit code once it has ended; -signal when it was killed.
  int Wait();
  // What it wrote to stdout and stderr; once it has ended.
  std::string Output();
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int code_ = 0;
  bool ended_ = false;
  UniqueFd ready_;
  UniqueFd output_;
};

}  // namespace dmuon::server

#endif  // DMUON_TESTS_SERVER_DAEMON_DAEMON_PROCESS_H_
