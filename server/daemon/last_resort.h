// Ends a process that does not end by itself: a call into a device's driver may never come back, and nothing can end the
// thread that made it.
#ifndef DMUON_SERVER_DAEMON_LAST_RESORT_H_
#define DMUON_SERVER_DAEMON_LAST_RESORT_H_

#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace dmuon::server {

class LastResort {
 public:
  LastResort();
  // Nothing is ended any more.
  ~LastResort();
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

  // From now on a signal of `signals` (a signalfd), or `patience` without an end, calls `end` on a thread of its own, with
  // whether it was a signal. Once.
  void Arm(int signals, absl::Duration patience, std::function<void(bool signalled)> end);

 private:
  UniqueFd over_;  // eventfd
  std::thread thread_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_DAEMON_LAST_RESORT_H_
