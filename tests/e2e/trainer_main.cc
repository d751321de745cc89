// One rank as a process of its own, for tests that kill it or run it as somebody else.
//
//   trainer MODE ENDPOINT JOB WORLD RANK
//
// attach  connects, prints "attached", and waits to be killed
// form    connects, prints "attached", and is then as open
// open    connects, opens the session, prints "opened", and waits to be killed
// idle    one step, prints "step 1", and waits to be killed
// train   trains for ever, a line "step N" after each
// stop    as train, but prints "sending" before the second STEP and waits in it
// once    one step, then leaves; prints "closed"
// signal  one step, a line "step N", and another one after each SIGUSR1
//
// Prints "error CODE MESSAGE" and ends with 1 when anything fails.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/trainer.h"

namespace dmuon::testing {
namespace {

void Say(const std::string& line) {
  printf("%s\n", line.c_str());
  fflush(stdout);
}

const sigset_t& Usr1() {
  static const sigset_t set = [] {
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    return usr1;
  }();
  return set;
}

absl::Status Run(const std::string& mode, const std::string& endpoint, const JobOptions& job,
                 int rank) {
  if (mode == "attach" || mode == "form" || mode == "open") {
    auto connection = client::Connection::Open(endpoint);
    if (!connection.ok()) return connection.status();
    if (mode != "open") Say("attached");
    if (mode != "attach") {
      auto session = (*connection)->OpenSession(SmallTable(job, rank));
      if (!session.ok()) return session.status();
      Say("opened");
      pause();
    }
    pause();
  }
  auto trainer = Trainer::Start(endpoint, job, rank);
  if (!trainer.ok()) return trainer.status();
  for (int step = 1;; ++step) {
    absl::Status status = (*trainer)->Backward();
    if (!status.ok()) return status;
    if (mode == "stop" && step == 2) Say("sending");
    status = (*trainer)->Step().status();
    if (!status.ok()) return status;
    // Of the steps of these two nothing is under way in the daemon any more when they are told.
    if (mode == "signal" || mode == "once") status = (*trainer)->session().WaitAllWeights();
    if (!status.ok()) return status;
    Say("step " + std::to_string(step));
    if (mode == "idle") pause();
    if (mode == "signal") {
      int signal = 0;
      sigwait(&Usr1(), &signal);
    }
    if (mode == "once") break;
  }
  const absl::Status closed = (*trainer)->Close();
  if (closed.ok()) Say("closed");
  return closed;
}

}  // namespace
}  // namespace dmuon::testing

int main(int argc, char** argv) {
  if (argc != 6) return 64;
  sigprocmask(SIG_BLOCK, &dmuon::testing::Usr1(),
              nullptr);  // threads that follow have it blocked, too
  const dmuon::testing::JobOptions job{.job = argv[3], .world = atoi(argv[4])};
  const absl::Status status = dmuon::testing::Run(argv[1], argv[2], job, atoi(argv[5]));
  if (status.ok()) return 0;
  dmuon::testing::Say("error " + status.ToString());
  return 1;
}
