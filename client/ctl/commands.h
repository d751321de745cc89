// What each verb of dmuonctl does.
#ifndef DMUON_CLIENT_CTL_COMMANDS_H_
#define DMUON_CLIENT_CTL_COMMANDS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/ctl/printer.h"

namespace dmuon::ctl {

struct Invocation {
  std::string verb;  // status, sessions, session, steps, step, drain
  std::string endpoint;
  absl::Duration timeout = absl::Seconds(10);
  Format format = Format::kTable;
  std::string session;  // session, steps, step
  bool watch = false;   // steps
  uint32_t last = 20;   // steps
  uint64_t step = 0;    // step; 0 = the last one
};

// Prints the answer to stdout.
absl::Status Run(const Invocation& invocation);

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_COMMANDS_H_
