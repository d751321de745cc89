// Does what may block for as long as a driver does, such as closing another process's memory, where nobody waits for it.
#ifndef DMUON_SERVER_MEMORY_REAPER_H_
#define DMUON_SERVER_MEMORY_REAPER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace dmuon::server {

// Thread-safe. Each piece of work has a thread of its own, so that none waits for another; one that is not done by its
// deadline is logged and left behind.
class Reaper {
 public:
  // One piece of work, for whoever wants to know when it is over.
  class Ticket {
   public:
    // What the work has returned; DEADLINE_EXCEEDED: nothing yet within `timeout`.
    absl::Status Wait(absl::Duration timeout) const;

   private:
    friend class Reaper;
    struct State;
    std::shared_ptr<State> state_;
  };

  explicit Reaper(absl::Duration deadline);
  // Waits for all work, each up to its deadline.
  ~Reaper();
  Reaper(const Reaper&) = delete;
  Reaper& operator=(const Reaper&) = delete;

  // `what` is for the log. `work` and all that it holds are gone before the ticket says that it is over.
  Ticket Post(std::string what, std::function<absl::Status()> work);
  absl::Duration deadline() const { return deadline_; }

 private:
  struct Shared;
  const absl::Duration deadline_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_MEMORY_REAPER_H_
