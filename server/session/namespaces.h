// What containers may keep apart, and drivers do not say.
#ifndef DMUON_SERVER_SESSION_NAMESPACES_H_
#define DMUON_SERVER_SESSION_NAMESPACES_H_

#include <sys/types.h>

#include <string>

namespace dmuon::server {

// The kinds of namespaces that matter to CUDA's handles in which that process is not where this one is: "pid", "ipc", "pid and
// ipc"; empty when it is in the same ones, or may not be looked at.
std::string NamespacesApart(pid_t process);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_SESSION_NAMESPACES_H_
