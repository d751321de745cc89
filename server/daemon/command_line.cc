#include "server/daemon/command_line.h"

#include <CLI/CLI.hpp>
#include <list>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "server/daemon/config_keys.h"
#include "server/daemon/config_value.h"
#include "server/daemon/exit_codes.h"

namespace dmuon::server {
namespace {

constexpr char kDescription[] =
    "dmuond: the per-node daemon that runs the Muon optimizer for training jobs.\n"
    "Trainers attach over unix sockets in one directory; ask it with dmuonctl.";

constexpr char kFooter[] =
    "\nEvery key can stand in the configuration file as `key: value`, in the environment as "
    "DMUOND_<KEY>, and here as\n"
    "--<key-with-dashes>; a flag wins over the environment, the environment over the file, the "
    "file over the default.\n"
    "Lists are separated by commas. deploy/dmuond.yaml documents each key. --print-config shows "
    "where each value is from.\n"
    "\nSIGTERM and SIGINT drain: no new sessions, the steps under way are finished, then all "
    "sessions are closed. Once more\n"
    "ends it at once.\n\n";

constexpr int kMaxDescriptor = (1 << 20) - 1;  // fs.nr_open, where nobody has raised it

// A variable that a script has not set must not mean "no file".
std::string NotEmpty(const std::string& path) {
  return path.empty() ? "expected the path of a file, given \"\"" : "";
}

std::string HelpOf(const ConfigKey& key) {
  return absl::StrCat(key.help, " [", key.fallback.empty() ? "\"\"" : key.fallback, "]");
}

// A key and what the command line gave for it. CLI11 keeps references: a list does not move its elements.
struct KeyOption {
  std::string key;
  std::string text;
  CLI::Option* option = nullptr;
};

void AddKeys(CLI::App& app, std::list<KeyOption>& options) {
  for (const ConfigKey& key : ConfigKeys()) {
    KeyOption& added = options.emplace_back();
    added.key = std::string(key.name);
    const std::string flag = FlagName(key.name);
    added.option = IsBool(key.name)
                       ? app.add_flag(flag, added.text, HelpOf(key))
                       : app.add_option(flag, added.text, HelpOf(key))->type_name("VALUE");
    added.option->group("Configuration")->take_last();
  }
}

// What was probably meant by a flag that is unknown.
std::string Hint(CLI::App& app) {
  std::vector<std::string> names = {"help",         "version",   "config",  "print-config",
                                    "check-config", "calibrate", "ready-fd"};
  for (const ConfigKey& key : ConfigKeys()) names.push_back(FlagName(key.name).substr(2));
  for (std::string given : app.remaining()) {
    if (given.rfind("--", 0) != 0) continue;
    given = given.substr(2, given.find('=') - 2);
    const std::string nearest = NearestName(given, names);
    if (!nearest.empty())
      return absl::StrCat("Did you mean --", nearest, " in place of --", given, "?\n");
  }
  return "";
}

}  // namespace

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  CommandLine result;
  CLI::App app(kDescription, "dmuond");
  app.set_help_flag("-h,--help", "Print this and exit");
  app.get_formatter()->column_width(34);
  bool version = false, print_config = false, check_config = false, calibrate = false;
  app.add_flag("--version", version, "Print the version and exit");
  app.add_option("--config", result.config, "Configuration file (YAML)")
      ->type_name("FILE")
      ->check(NotEmpty);
  auto* print = app.add_flag("--print-config", print_config,
                             "Print each value and where it came from, and exit");
  auto* check =
      app.add_flag("--check-config", check_config, "Exit with 0, or with 3 and a message");
  print->excludes(check);
  app.add_flag(
         "--calibrate", calibrate,
         "Measure what both forms of Newton-Schulz cost here, in half a minute at most, print it, "
         "write calibration_file, and exit")
      ->excludes(print)
      ->excludes(check);
  app.add_option("--ready-fd", result.ready_fd,
                 "Write \"ready\" to this descriptor once both sockets accept")
      ->type_name("N")
      ->check(CLI::Range(0, kMaxDescriptor));
  std::list<KeyOption> keys;
  AddKeys(app, keys);
  app.footer(absl::StrCat(kFooter, kExitCodes));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::ostringstream out, error;
    result.action = CommandLine::Action::kExit;
    const bool usage = app.exit(e, out, error) != 0;
    result.exit_code = static_cast<int>(usage ? ExitCode::kUsage : ExitCode::kOk);
    result.text = usage ? absl::StrCat("dmuond: ", error.str(), Hint(app)) : out.str();
    return result;
  }
  if (version) {
    result.action = CommandLine::Action::kExit;
    result.text = absl::StrCat("dmuond ", DMUON_VERSION, "\n");
  } else if (print_config) {
    result.action = CommandLine::Action::kPrintConfig;
  } else if (check_config) {
    result.action = CommandLine::Action::kCheckConfig;
  } else if (calibrate) {
    result.action = CommandLine::Action::kCalibrate;
  }
  for (const KeyOption& key : keys) {
    if (key.option->count() > 0) result.flags.emplace_back(key.key, key.text);
  }
  return result;
}

}  // namespace dmuon::server
