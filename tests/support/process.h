// Real processes for end-to-end tests: a child with its output, and what /proc says about a process.
#ifndef DMUON_TESTS_SUPPORT_PROCESS_H_
#define DMUON_TESTS_SUPPORT_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace dmuon::testing {

// What no test waits longer for, even on a busy machine.
inline constexpr absl::Duration kPatience = absl::Seconds(60);

// Polls until `condition` or `patience`; what it returned last.
bool Eventually(absl::FunctionRef<bool()> condition, absl::Duration patience = kPatience);

// A program of this project: beside the one that runs, wherever both were put.
std::string Program(const std::string& name);

struct SpawnOptions {
  std::optional<uid_t> uid;  // in our group; needs root
  std::string stderr_path;   // "" = ours
};

// A program that runs beside the test. Killed and reaped in the destructor.
class ChildProcess {
 public:
  ChildProcess() = default;
  explicit ChildProcess(const std::vector<std::string>& arguments,
                        const SpawnOptions& options = {});
  ChildProcess(ChildProcess&& other) noexcept { *this = std::move(other); }
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  void Signal(int signal) const;
  // The next line of its stdout without the newline; nullopt at its end or after kPatience.
  std::optional<std::string> ReadLine();
  // All the rest of its stdout.
  std::string ReadAll();
  // Waits for its end: the exit code, or 128 + signal. Kills it after kPatience.
  int Wait();

 private:
  bool Fill();

  pid_t pid_ = -1;
  int result_ = -1;
  UniqueFd stdout_;
  std::string buffer_;
};

// What a process holds. Fails the test program when the process is gone.
struct ProcessUse {
  int descriptors = 0;
  int memfd_mappings = 0;  // arenas and control pages
  int mappings = 0;
  long rss_kib = 0;
};
ProcessUse UseOf(pid_t pid);
std::string DescriptorsOf(pid_t pid);  // for messages

// A directory of its own, gone with the object.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(mode_t mode = 0700);
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace dmuon::testing

#endif  // DMUON_TESTS_SUPPORT_PROCESS_H_
