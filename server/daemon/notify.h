// What systemd is told of the daemon's life (sd_notify(3)): datagrams to the socket in NOTIFY_SOCKET.
#ifndef DMUON_SERVER_DAEMON_NOTIFY_H_
#define DMUON_SERVER_DAEMON_NOTIFY_H_

#include "absl/strings/string_view.h"

namespace dmuon::server {

// "READY=1\nSTATUS=serving". Does nothing when nobody asked; what goes wrong is nobody's business but the log's.
void NotifySystemd(absl::string_view state);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_NOTIFY_H_
