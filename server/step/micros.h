// Which gradients the ranks have sent: how many micros of a boundary.
#ifndef DMUON_SERVER_STEP_MICROS_H_
#define DMUON_SERVER_STEP_MICROS_H_

#include <cstdint>

#include "server/step/context.h"

namespace dmuon::server {

// Micros of `generation` that `slot` has sent.
uint32_t AnnouncedMicros(const StepContext& context, SlotId slot, BoundaryId boundary,
                         uint64_t generation);
// The most that any slot has sent.
uint32_t SentMicros(const StepContext& context, BoundaryId boundary, uint64_t generation);
// Those that no rank will add anything to.
uint32_t ReadableMicros(const StepContext& context, BoundaryId boundary, uint64_t generation);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_MICROS_H_
