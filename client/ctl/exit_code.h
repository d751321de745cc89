// dmuonctl's exit codes. They are API: scripts branch on them.
#ifndef DMUON_CLIENT_CTL_EXIT_CODE_H_
#define DMUON_CLIENT_CTL_EXIT_CODE_H_

#include "absl/status/status.h"

namespace dmuon::ctl {

enum ExitCode {
  kOk = 0,
  kFailed = 1,
  kUnreachable = 2,  // no daemon answers, or it went away
  kInvalidInput = 3,
  kPrecondition = 4,  // not in this state
  kDenied = 7,
  kNotFound = 8,
  kTimedOut = 9,
  kUsage = 64,
  kInterrupted = 130,
};

ExitCode ToExitCode(const absl::Status& status);

// For --help.
inline constexpr char kExitCodeHelp[] =
    "Exit codes:\n"
    "  0    ok\n"
    "  1    failed\n"
    "  2    cannot reach the daemon\n"
    "  3    invalid input\n"
    "  4    the daemon or session is not in a state for this\n"
    "  7    denied\n"
    "  8    not found\n"
    "  9    timed out\n"
    "  64   usage: the command line is wrong\n"
    "  130  interrupted (Ctrl-C)\n";

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_EXIT_CODE_H_
