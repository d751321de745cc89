// How the slots of a session agree: the seam between one daemon's memory and a network.
//
// Two things are agreed. Which gradients are there: each slot announces, boundary by boundary, the last micro that can
// be read. And the rounds of a step: each slot posts one small message and, when all have, reads those of the others;
// a round is complete for everyone or aborted for everyone, never both. No call blocks: a worker that waits keeps
// draining its ring.
#ifndef DMUON_SERVER_COLLECTIVE_COMMUNICATOR_H_
#define DMUON_SERVER_COLLECTIVE_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/parameter/parameter.h"

namespace dmuon::server {

enum class RoundState { kOpen, kComplete, kAborted };

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int size() const = 0;

  // `mark` is a wire::ConsumedMark; it only rises. Announced of another slot is acquired: its gradients can be read.
  virtual void Announce(SlotId slot, BoundaryId boundary, uint64_t mark) = 0;
  virtual uint64_t Announced(SlotId slot, BoundaryId boundary) const = 0;

  // One message of the current round. A slot posts once a round. At most the bytes that were agreed at creation.
  virtual void Post(SlotId slot, absl::Span<const std::byte> message) = 0;
  // Of the round that `slot` posted last.
  virtual RoundState State(SlotId slot) const = 0;
  // The message of `from` in the round that `slot` posted last. REQUIRES: that round is complete.
  virtual absl::Span<const std::byte> Message(SlotId slot, SlotId from) const = 0;
  // Slots that have not posted in the round that `slot` posted last.
  virtual std::vector<SlotId> Missing(SlotId slot) const = 0;
  // Aborts the round that `slot` posted last, unless it is complete. The first cause counts.
  virtual void Abort(SlotId slot, const absl::Status& cause) = 0;
  // Why the round that `slot` posted last was aborted.
  virtual absl::Status Cause(SlotId slot) const = 0;

  // This slot will post no more, and why. OK while it may.
  virtual void SetGone(SlotId slot, const absl::Status& why) = 0;
  virtual absl::Status Gone(SlotId slot) const = 0;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_COMMUNICATOR_H_
