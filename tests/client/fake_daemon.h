// The daemon's side of the client's contracts, without the daemon: an attach socket that answers from a script, and a
// control page whose records a test reads and answers itself.
#ifndef DMUON_TESTS_CLIENT_FAKE_DAEMON_H_
#define DMUON_TESTS_CLIENT_FAKE_DAEMON_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "client/endpoint.h"
#include "proto/wire/attach_frame.h"
#include "proto/wire/control_page.h"
#include "tests/support/process.h"

namespace dmuon::client {

using dmuon::testing::TemporaryDirectory;

struct Answer {
  wire::AttachFrame frame;
  std::vector<UniqueFd> descriptors;
  size_t bytes = sizeof(wire::AttachFrame);  // of the frame that are sent
  bool hang_up = false;                      // instead of answering
};

// Listens on attach.sock and serves one connection on its own thread.
class FakeAttachServer {
 public:
  using Script = std::function<Answer(const wire::AttachFrame&)>;
  FakeAttachServer(const Endpoint& endpoint, Script script);
  // Ends the connection and the thread.
  ~FakeAttachServer();

  // Ends the connection, as a daemon that takes the attachment away.
  void HangUp();

 private:
  void Serve(const Script& script);

  UniqueFd listener_;
  UniqueFd stop_read_, stop_write_;
  std::thread thread_;
};

// WELCOME with a fixed token, and ERROR for all else.
Answer Welcome(const wire::AttachFrame& frame);
inline constexpr char kWelcomeToken[] = "000102030405060708090a0b0c0d0e0f";

// A sealed memfd of `bytes`, as the daemon makes them.
UniqueFd SealedMemory(size_t bytes);

// A control page in plain memory.
class PageMemory {
 public:
  PageMemory(const wire::PageLayout& layout, uint64_t table_digest);
  wire::ControlPage page() const { return page_; }

 private:
  struct Freed {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Freed> memory_;
  wire::ControlPage page_;
};

}  // namespace dmuon::client

#endif  // DMUON_TESTS_CLIENT_FAKE_DAEMON_H_
