// What dmuond is asked to do, from its arguments.
#ifndef DMUON_SERVER_DAEMON_COMMAND_LINE_H_
#define DMUON_SERVER_DAEMON_COMMAND_LINE_H_

#include <string>
#include <utility>
#include <vector>

namespace dmuon::server {

struct CommandLine {
  enum class Action {
    kRun,
    kExit,  // all is said (help, version, or a usage error): print `text`, exit with `exit_code`
    kPrintConfig,
    kCheckConfig,
    kCalibrate,
  };
  Action action = Action::kRun;
  int exit_code = 0;
  std::string text;    // for stdout when exit_code is 0, else for stderr
  std::string config;  // --config; "" = none
  int ready_fd = -1;   // --ready-fd
  std::vector<std::pair<std::string, std::string>> flags;  // key and text
};

CommandLine ParseCommandLine(int argc, const char* const* argv);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_COMMAND_LINE_H_
