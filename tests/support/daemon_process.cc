#include "tests/support/daemon_process.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace dmuon::testing {

DaemonProcess::DaemonProcess(const std::string& program, const std::vector<std::string>& flags,
                             bool shared)
    : directory_(0755), endpoint_(directory_.path() + "/run") {
  // Its stdout is our pipe: the word "ready" comes there.
  std::vector<std::string> arguments = {program, "--socket-dir", endpoint_, "--ready-fd", "1"};
  arguments.insert(arguments.end(), {"--socket-mode", shared ? "0750" : "0700"});
  arguments.insert(arguments.end(), {"--calibration-file", ""});  // not what this machine measured
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  process_ = ChildProcess(arguments, {.stderr_path = directory_.path() + "/log"});
  if (process_.ReadLine() == "ready") return;
  fprintf(stderr, "dmuond did not start:\n%s\n", Log().c_str());
  abort();
}

DaemonProcess::~DaemonProcess() {
  if (::testing::Test::HasFailure())
    fprintf(stderr, "--- log of dmuond ---\n%s---\n", Log().c_str());
}

std::string DaemonProcess::Log() const {
  std::ifstream file(directory_.path() + "/log");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace dmuon::testing
