// A real dmuond in a directory of its own.
#ifndef DMUON_TESTS_SUPPORT_DAEMON_PROCESS_H_
#define DMUON_TESTS_SUPPORT_DAEMON_PROCESS_H_

#include <string>
#include <vector>

#include "tests/support/process.h"

namespace dmuon::testing {

class DaemonProcess {
 public:
  // Starts it with `flags` besides --socket-dir and --ready-fd, and waits until it is ready. Aborts with its log when it
  // does not come up. `program`: the path of dmuond. `shared`: sockets that
  // other users of our group can reach.
  explicit DaemonProcess(const std::string& program, const std::vector<std::string>& flags = {},
                         bool shared = false);
  // Prints the log when the test has failed.
  ~DaemonProcess();

  const std::string& endpoint() const { return endpoint_; }
  pid_t pid() const { return process_.pid(); }
  ProcessUse Use() const { return UseOf(pid()); }
  void Signal(int signal) const { process_.Signal(signal); }
  int Wait() { return process_.Wait(); }
  std::string Log() const;
  const std::string& directory() const { return directory_.path(); }

 private:
  TemporaryDirectory directory_;
  std::string endpoint_;
  ChildProcess process_;
};

}  // namespace dmuon::testing

#endif  // DMUON_TESTS_SUPPORT_DAEMON_PROCESS_H_
