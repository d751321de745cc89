// How gradients come to their owner and weights to the trainers, from one slot's side: the seam between a step and where the
// slots' devices are. Slots that read each other's memory need nobody; those that cannot take part in exchanges. Which of the
// two it is, is decided once, when the session is configured.
//
// Touched by its worker alone, but for Await. Nothing here waits, but for Await and Quiesce.
#ifndef DMUON_SERVER_STEP_COURIER_H_
#define DMUON_SERVER_STEP_COURIER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/backend.h"
#include "server/step/context.h"
#include "server/step/record_table.h"

namespace dmuon::server {

// A weight that was given to the courier.
struct Sent {
  uint64_t mark = 0;      // on the owner's stream
  uint64_t position = 0;  // among exchanges; 0: none
};

class Courier {
 public:
  virtual ~Courier() = default;

  // ---- stage 1
  // Fetches every micro of `generation` that all ranks have sent, as soon as they have. What was left of earlier generations
  // is dropped, and may be written over.
  virtual void FetchReady(uint64_t generation) = 0;
  // All ranks have sent STEP: fetches what is left. A rank that did not send a micro counts as zeros.
  virtual void FetchRest(uint64_t generation) = 0;
  // Whether the means of all that is owned are on the slot's stream since FetchRest. An error: why they do not come; nothing of
  // this step is to be changed, and the next one may work.
  virtual absl::StatusOr<bool> Fetched() = 0;
  // Whether any micro of the boundary came in `generation`, to this owner.
  virtual bool Has(BoundaryId boundary, uint64_t generation) const = 0;
  // What all slots must have done alike to get there.
  virtual uint64_t digest() const = 0;

  // ---- stage 4
  // Brings the owner's master of `parameter`, as the stream leaves it, to every trainer, when it has `changed`.
  virtual Sent Publish(ParameterId parameter, bool changed) = 0;
  // Whether it has arrived everywhere.
  virtual absl::StatusOr<bool> Arrived(const Sent& sent) = 0;
  // The same, from any thread, for what was published outside of steps.
  virtual absl::Status Await(const Sent& sent) = 0;
  // Z3: fills the windows that this slot's trainer asked for and whose weights have reached `step`, and grants those that the
  // device has filled; keeps the others.
  virtual void FillWindows(uint64_t step, std::vector<Materialization>& wanted) = 0;

  // ---- in between
  // Tells the trainers what has been read meanwhile: they may write it over.
  virtual void Settle() = 0;
  // Moves on what waits for others. `gradients`: also those that take the place of the last ones.
  virtual void Advance(bool gradients) = 0;
  // Whether something moves on without a doorbell.
  virtual bool Busy() const = 0;
  // Waits for all that is enqueued beside the slot's stream.
  virtual void Quiesce() = 0;
};

// The courier that `context` asks for, with its memory. `stream`: the slot's own.
absl::StatusOr<std::unique_ptr<Courier>> MakeCourier(StepContext& context, SlotId slot,
                                                     kernels::Stream stream);
// What the courier that MakeCourier will make takes.
struct CourierNeeds {
  uint64_t staging_bytes = 0;  // private memory of the slot's device
  uint64_t streams = 0;        // beside the slot's own
};
CourierNeeds NeedsOfCourier(const StepContext& context, SlotId slot);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_COURIER_H_
