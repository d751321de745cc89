// The registry of attachments: which processes are attached, and the token by which each is known to gRPC.
//
// Thread-safe. An attachment begins with HELLO on the attach socket and ends with its process; from then on its token
// names nobody. Tokens are 16 random bytes and are compared in constant time.
#ifndef DMUON_SERVER_ATTACH_ATTACHMENTS_H_
#define DMUON_SERVER_ATTACH_ATTACHMENTS_H_

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "proto/wire/attach_frame.h"
#include "server/session/types.h"

namespace dmuon::server {

using Token = std::array<uint8_t, wire::kTokenBytes>;

struct AttachmentLimits {
  int attachments = 1024;  // of the daemon
  int per_process = 128;   // one process cannot take them all
  int calls_per_attachment =
      16;  // gRPC calls of one trainer that run at once; each blocks a thread
};

class Attachments {
 public:
  explicit Attachments(AttachmentLimits limits = {}) : limits_(limits) {}

  struct Added {
    Trainer trainer;
    Token token;
  };
  // A process attached; twice gives two attachments. RESOURCE_EXHAUSTED names the limit.
  absl::StatusOr<Added> Add(uid_t uid, pid_t pid);
  // The token dies. False when the attachment was not there.
  bool Remove(AttachmentId id);
  // Those that were removed while calls of theirs still run. Such a call may enter the trainer into a session after the
  // sessions were told of its death, so they must be told again until it has ended.
  std::vector<AttachmentId> RemovedWithCalls() const;

  // Begins a call of the trainer whose token this is, 32 hex digits. UNAUTHENTICATED for a token that names nobody;
  // RESOURCE_EXHAUSTED when too many calls of this trainer run. Each success is followed by EndCall, which is false
  // when the attachment ended during the call: what the call did for the trainer must be undone.
  absl::StatusOr<Trainer> BeginCall(absl::string_view token_hex);
  bool EndCall(AttachmentId id);

  // The sessions that the trainer opened and has not closed.
  void Entered(AttachmentId id, SessionId session);
  void Left(AttachmentId id, SessionId session);
  bool InSession(AttachmentId id) const;

  // Those that have not ended.
  int size() const;

 private:
  struct Entry {
    Trainer trainer;
    Token token;
    int calls = 0;
    bool removed = false;  // and waits for its calls to end
    std::set<SessionId> sessions;
  };

  int Alive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const AttachmentLimits limits_;
  mutable absl::Mutex mu_;
  std::map<AttachmentId, Entry> entries_ ABSL_GUARDED_BY(mu_);
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_ATTACH_ATTACHMENTS_H_
