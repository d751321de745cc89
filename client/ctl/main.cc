// dmuonctl: what an operator asks a daemon. The one file that sees the command line library.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/ctl/admin.h"
#include "client/ctl/commands.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/usage.h"
#include "client/endpoint.h"

namespace {

using dmuon::ctl::Format;
using dmuon::ctl::Invocation;

// Said before all other words of an error, as those of a call that failed.
std::string UsageError(const CLI::App* app, const CLI::Error& error) {
  std::string what = error.what();
  const std::vector<std::string> unknown = app->remaining();
  if (app->get_subcommands().empty() && !unknown.empty()) {
    std::vector<std::string> verbs;
    for (const CLI::App* verb : app->get_subcommands({})) verbs.push_back(verb->get_name());
    what = unknown[0].front() == '-' ? "no such option: " + unknown[0]
                                     : dmuon::ctl::UnknownVerb(unknown[0], verbs);
  }
  return "dmuonctl: " + what + "\nRun with --help for more information.\n";
}

CLI::Validator Whole(uint64_t most) {
  return CLI::Validator(
      [most](const std::string& text) { return dmuon::ctl::CheckWhole(text, most); }, "");
}

void Define(CLI::App& app, Invocation& invocation, double& timeout_seconds, std::string& format) {
  app.footer(std::string("\n") + dmuon::ctl::kExitCodeHelp);
  app.failure_message(UsageError);
  app.require_subcommand(1);
  app.fallthrough();  // global options may come after the verb
  app.add_option("--endpoint", invocation.endpoint, "Directory of the daemon's sockets")
      ->envname("DMUON_ENDPOINT")
      ->take_last()
      ->capture_default_str();
  app.add_option("--timeout", timeout_seconds, "Seconds to wait for an answer")
      ->check(CLI::Validator(dmuon::ctl::CheckTimeout, "0.001 to 86400"))
      ->capture_default_str();
  app.add_option("-o,--output", format, "How to print")
      ->check(CLI::IsMember({"table", "json", "yaml"}))
      ->capture_default_str();
  app.set_version_flag("--version", DMUON_VERSION);

  app.add_subcommand("status", "The daemon: version, backend, sessions");
  app.add_subcommand("sessions", "All sessions");
  CLI::App* session =
      app.add_subcommand("session", "One session: who owns what, loads, memory, attachments");
  session->add_option("NAME", invocation.session, "The job's name")->required();
  CLI::App* steps = app.add_subcommand("steps", "What the last steps of a session cost");
  steps->add_option("NAME", invocation.session, "The job's name")->required();
  steps->add_flag("-w,--watch", invocation.watch, "Go on with every later step, until Ctrl-C");
  steps->add_option("--last", invocation.last, "How many remembered steps")
      ->check(Whole(std::numeric_limits<uint32_t>::max()))
      ->capture_default_str();
  CLI::App* step = app.add_subcommand("step", "One step of a session, block by block");
  step->add_option("NAME", invocation.session, "The job's name")->required();
  step->add_option("ID", invocation.step, "Its number; without one, or 0: the last step")
      ->check(Whole(std::numeric_limits<uint64_t>::max()));
  app.add_subcommand("drain",
                     "Refuse new sessions, finish the steps under way, then stop the daemon");
}

}  // namespace

int main(int argc, char** argv) {
  Invocation invocation;
  invocation.endpoint = dmuon::client::kDefaultDirectory;
  double timeout_seconds = 10;
  std::string format = "table";
  CLI::App app("Ask and steer a dmuon daemon.", "dmuonctl");
  Define(app, invocation, timeout_seconds, format);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? dmuon::ctl::kOk : dmuon::ctl::kUsage;
  }
  invocation.verb = app.get_subcommands().front()->get_name();
  invocation.format = format == "json"   ? Format::kJson
                      : format == "yaml" ? Format::kYaml
                                         : Format::kTable;
  invocation.timeout = absl::Seconds(timeout_seconds);

  dmuon::ctl::InstallInterrupt();
  absl::Status status = dmuon::ctl::Run(invocation);
  if (status.ok() && (fflush(stdout) != 0 || ferror(stdout) != 0)) {
    status = absl::DataLossError("cannot write to standard output: the answer is not complete");
  }
  if (!status.ok() && !absl::IsCancelled(status)) {
    fprintf(stderr, "dmuonctl: %s\n", std::string(status.message()).c_str());
  }
  return dmuon::ctl::ToExitCode(status);
}
