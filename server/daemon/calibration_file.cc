#include "server/daemon/calibration_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "dmuon/config/v1/calibration.pb.h"
#include "google/protobuf/util/json_util.h"
#include "server/rpc/cost_table.h"

namespace dmuon::server {
namespace {

constexpr uint32_t kVersion = 1;
constexpr size_t kMaxBytes = 256 << 10;  // a calibration is a few KiB

// As /proc/cpuinfo calls it; where it does not, what the kernel was built for.
std::string Processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(':');
    if (!absl::StartsWith(line, "model name") || colon == std::string::npos) continue;
    return std::string(absl::StripAsciiWhitespace(absl::string_view(line).substr(colon + 1)));
  }
#if defined(__aarch64__)
  return "aarch64";
#else
  return "unknown processor";
#endif
}

// Whatever is in the file: what is said of it goes into logs and answers, which are UTF-8 and have lines.
std::string Excerpt(absl::string_view text) {
  constexpr size_t kShown = 64;
  return absl::StrCat(absl::CHexEscape(text.substr(0, kShown)), text.size() > kShown ? "..." : "");
}

absl::Status Expect(absl::string_view what, absl::string_view expected, absl::string_view given) {
  if (expected == given) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("it belongs to another ", what, ": expected '",
                                                    expected, "', given '", Excerpt(given), "'"));
}

absl::Status CheckMachine(const config::v1::Calibration& message,
                          const CalibratedMachine& machine) {
  RETURN_IF_ERROR(Expect("version", absl::StrCat(kVersion), absl::StrCat(message.version())));
  RETURN_IF_ERROR(Expect("backend", machine.backend, message.backend()));
  RETURN_IF_ERROR(Expect("device", machine.device, message.device()));
  RETURN_IF_ERROR(Expect("kernel", machine.kernel, message.kernel()));
  return Expect("number of threads", absl::StrCat(machine.threads),
                absl::StrCat(message.threads()));
}

// A pipe or a device in its place must not hold up the start, nor fill the memory.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return absl::ErrnoToStatus(errno, "opening it");
  struct stat found;
  if (fstat(file.get(), &found) != 0) return absl::ErrnoToStatus(errno, "looking at it");
  if (!S_ISREG(found.st_mode)) return absl::InvalidArgumentError("it is not a regular file");
  std::string text(kMaxBytes + 1, '\0');
  size_t length = 0;
  while (length < text.size()) {
    const ssize_t n = read(file.get(), text.data() + length, text.size() - length);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::ErrnoToStatus(errno, "reading it");
    if (n == 0) break;
    length += static_cast<size_t>(n);
  }
  if (length > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("size: expected at most ", kMaxBytes, " bytes, given more"));
  }
  text.resize(length);
  return text;
}

}  // namespace

absl::StatusOr<CalibratedMachine> DescribeMachine(kernels::Backend& backend, int threads) {
  constexpr int64_t kRows = 256, kCols = 1024;  // any block that is not small
  kernels::NewtonSchulzOptions options;
  options.measure = false;  // the same name every time, and a daemon's start times nothing
  ASSIGN_OR_RETURN(const auto plan, kernels::PlanNewtonSchulz(backend, options, kRows, kCols));
  const bool cpu = backend.name() == "cpu";
  return CalibratedMachine{std::string(backend.name()), cpu ? Processor() : backend.description(),
                           plan->kernel(), threads};
}

absl::StatusOr<ReplacedFile> OpenCalibration(const std::string& path) {
  return ReplacedFile::Open(path, kMaxBytes);
}

absl::Status WriteCalibration(ReplacedFile& file, const Calibration& calibration) {
  config::v1::Calibration message;
  message.set_version(kVersion);
  message.set_backend(calibration.machine.backend);
  message.set_device(calibration.machine.device);
  message.set_kernel(calibration.machine.kernel);
  message.set_threads(static_cast<uint32_t>(calibration.machine.threads));
  message.set_measured_unix_seconds(absl::ToUnixSeconds(calibration.measured));
  *message.mutable_costs() = rpc::ToProto(calibration.costs);
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto printed = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!printed.ok()) return absl::InternalError(printed.ToString());
  return file.Replace(text);
}

absl::StatusOr<Calibration> ReadCalibration(const std::string& path,
                                            const CalibratedMachine& machine) {
  absl::StatusOr<std::string> text = ReadRegularFile(path);
  if (!text.ok()) return Annotate(text.status(), path);
  config::v1::Calibration message;
  // A later version may have more fields; its number says so better than the first of them.
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  const auto parsed = google::protobuf::util::JsonStringToMessage(*text, &message, options);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": expected a calibration as JSON, given '", Excerpt(*text), "'"));
  }
  RETURN_IF_ERROR(Annotate(CheckMachine(message, machine), path));
  absl::StatusOr<kernels::CostTable> costs = rpc::FromProto(message.costs());
  if (!costs.ok()) return Annotate(costs.status(), path);
  return Calibration{machine, absl::FromUnixSeconds(message.measured_unix_seconds()),
                     *std::move(costs)};
}

}  // namespace dmuon::server
