#include "server/daemon/cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dmuon::server {

int CoresWithin(int mask, absl::string_view cpu_max) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(cpu_max, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  int64_t quota, period;
  if (words.size() != 2 || !absl::SimpleAtoi(words[0], &quota) ||
      !absl::SimpleAtoi(words[1], &period) || quota < 1 || period < 1) {
    return mask;
  }
  return static_cast<int>(std::clamp<int64_t>((quota - 1) / period + 1, 1, mask));
}

int UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int mask = sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
  // The root of what this process sees: in a container its own group, where a limit on the container stands.
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string cpu_max;
  std::getline(file, cpu_max);
  return CoresWithin(mask, cpu_max);
}

Threads ThreadsFor(int wished, int usable) {
  if (wished <= usable) return {wished > 0 ? wished : usable, ""};
  return {usable, absl::StrCat("threads: ", wished, " asked for, ", usable,
                               " cores may be used (affinity mask, cgroup quota): using ", usable)};
}

}  // namespace dmuon::server
