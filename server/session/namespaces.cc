#include "server/session/namespaces.h"

#include <sys/stat.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dmuon::server {

std::string NamespacesApart(pid_t process) {
  std::vector<std::string> apart;
  for (const char* kind : {"pid", "ipc"}) {
    struct stat ours, theirs;
    if (stat(absl::StrCat("/proc/self/ns/", kind).c_str(), &ours) != 0 ||
        stat(absl::StrCat("/proc/", process, "/ns/", kind).c_str(), &theirs) != 0) {
      continue;
    }
    if (ours.st_ino != theirs.st_ino || ours.st_dev != theirs.st_dev) apart.emplace_back(kind);
  }
  return absl::StrJoin(apart, " and ");
}

}  // namespace dmuon::server
