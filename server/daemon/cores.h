// How many cores the kernels may use.
#ifndef DMUON_SERVER_DAEMON_CORES_H_
#define DMUON_SERVER_DAEMON_CORES_H_

#include <string>

#include "absl/strings/string_view.h"

namespace dmuon::server {

// Of the affinity mask, and no more than the cgroup's quota is worth.
int UsableCores();

// Cores that a quota is worth, rounded up, from what cgroup v2 says in cpu.max ("200000 100000"); `mask` when it says
// "max", or nothing that can be understood. Never more than `mask`, never less than 1.
int CoresWithin(int mask, absl::string_view cpu_max);

struct Threads {
  int count = 1;
  std::string warning;  // why it is not what was wished; else empty
};

// `wished` of the configuration (0: all that are usable), never more than the usable ones: threads beyond them would only
// take turns.
Threads ThreadsFor(int wished, int usable);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_CORES_H_
