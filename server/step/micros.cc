#include "server/step/micros.h"

#include <algorithm>
#include <limits>

namespace dmuon::server {

uint32_t AnnouncedMicros(const StepContext& context, SlotId slot, BoundaryId boundary,
                         uint64_t generation) {
  const uint64_t mark = context.communicator->Announced(slot, boundary);
  return mark >> 16 == generation ? static_cast<uint32_t>(mark & 0xffff) : 0;
}

uint32_t SentMicros(const StepContext& context, BoundaryId boundary, uint64_t generation) {
  uint32_t most = 0;
  for (int s = 0; s < context.slots(); ++s) {
    most = std::max(most, AnnouncedMicros(context, SlotId(s), boundary, generation));
  }
  return most;
}

uint32_t ReadableMicros(const StepContext& context, BoundaryId boundary, uint64_t generation) {
  uint32_t fewest = std::numeric_limits<uint32_t>::max(), most = 0;
  for (int s = 0; s < context.slots(); ++s) {
    // Closed first: what was announced before it is then seen.
    const bool closed = context.closed_generation[s].load(std::memory_order_acquire) >= generation;
    const uint32_t announced = AnnouncedMicros(context, SlotId(s), boundary, generation);
    most = std::max(most, announced);
    if (!closed) fewest = std::min(fewest, announced);
  }
  return std::min(fewest, most);
}

}  // namespace dmuon::server
