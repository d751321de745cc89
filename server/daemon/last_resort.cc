#include "server/daemon/last_resort.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <utility>

namespace dmuon::server {

LastResort::LastResort() : over_(eventfd(0, EFD_CLOEXEC)) {}

LastResort::~LastResort() {
  eventfd_write(over_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

void LastResort::Arm(int signals, absl::Duration patience,
                     std::function<void(bool signalled)> end) {
  thread_ = std::thread([this, signals, patience, end = std::move(end)] {
    pollfd watched[] = {{over_.get(), POLLIN, 0}, {signals, POLLIN, 0}};
    poll(watched, 2, static_cast<int>(absl::ToInt64Milliseconds(patience)));
    if (watched[0].revents == 0) end(watched[1].revents != 0);
  });
}

}  // namespace dmuon::server
