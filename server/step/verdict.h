// What the slots of a session tell each other about a step, and what each concludes from it. A pure function of the
// gathered messages, so that all slots conclude the same.
#ifndef DMUON_SERVER_STEP_VERDICT_H_
#define DMUON_SERVER_STEP_VERDICT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/step/context.h"

namespace dmuon::server {

// First round: this rank's STEP has come. `hyper_digest` and `presence` lie behind it in the message.
struct Arrival {
  uint64_t step = 0;
  uint64_t generation = 0;
  int64_t unix_nanos = 0;
  double max_norm = 0;
  uint32_t micros = 0;
  uint32_t flags = 0;
};

// Second round: how the gradients came to this slot. The square sums of what it owns lie behind it in the message, in the order
// of the plan.
struct Reduction {
  uint64_t digest = 0;  // of the exchanges that brought them
  uint32_t code = 0;    // of absl::Status: why some did not come
  uint32_t unused = 0;
  char reason[400] = {};  // NUL-terminated
};

// Writes and reads the messages of the two rounds; sizes are fixed by the session.
class Messages {
 public:
  explicit Messages(const StepContext& context);
  size_t max_bytes() const;

  // From the slot's STEP record and its page; `hyper` receives the group table as it was then.
  absl::Span<const std::byte> Arrive(const wire::Record& record, const wire::ControlPage& page,
                                     std::vector<wire::GroupHyper>& hyper);
  static const Arrival& ArrivalOf(absl::Span<const std::byte> message);
  uint64_t HyperDigest(absl::Span<const std::byte> message, int group) const;
  bool Present(absl::Span<const std::byte> message, ParameterId parameter) const;

  absl::Span<const std::byte> Reduce(const absl::Status& status, uint64_t digest,
                                     absl::Span<const double> square_sums);
  static const Reduction& ReductionOf(absl::Span<const std::byte> message);
  static absl::Span<const double> NormsOf(absl::Span<const std::byte> message);

 private:
  const size_t groups_;
  const size_t presence_words_;
  const size_t max_owned_;
  std::vector<std::byte> buffer_;
};

// FAILED_PRECONDITION: ranks are at different generations or passes. INVALID_ARGUMENT: groups or clips that differ.
// Names what differs and the ranks on each side.
absl::Status CheckArrivals(const StepContext& context, const Messages& messages,
                           absl::Span<const absl::Span<const std::byte>> arrivals);

// ABORTED: gradients did not come to some slot, and why. INTERNAL: slots took part in different exchanges, and which.
absl::Status CheckReductions(uint64_t step,
                             absl::Span<const absl::Span<const std::byte>> reductions);

// INVALID_ARGUMENT when a group's values make no sense for its route, by group, field and value. Allocates nothing when
// they do.
absl::Status CheckHyper(const StepContext& context, uint64_t step,
                        absl::Span<const wire::GroupHyper> hyper);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_VERDICT_H_
