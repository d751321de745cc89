// How dmuond ends, as `dmuond --help`, systemd and scripts read it.
#ifndef DMUON_SERVER_DAEMON_EXIT_CODES_H_
#define DMUON_SERVER_DAEMON_EXIT_CODES_H_

namespace dmuon::server {

enum class ExitCode {
  kOk = 0,             // clean end: drained, idle, or what was asked for is printed
  kFailed = 1,         // failed while running, or a second signal cut the drain short
  kUsage = 2,          // wrong command line
  kConfiguration = 3,  // bad configuration: file, environment or value of a flag
  kSocketDir = 4,      // the socket directory cannot be used, or another daemon is alive there
  kBackend = 5,        // the backend cannot start
  kInternal = 70,      // a bug
};

// The same, for --help and the documents.
inline constexpr char kExitCodes[] =
    "Exit codes:\n"
    "  0   clean end: drained, idle, or what was asked for is printed\n"
    "  1   failed while running, or a second signal cut the drain short\n"
    "  2   wrong command line\n"
    "  3   bad configuration: file, environment or value of a flag\n"
    "  4   the socket directory cannot be used, or another daemon is alive there\n"
    "  5   the backend cannot start\n"
    "  70  internal error: a bug\n";

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_EXIT_CODES_H_
