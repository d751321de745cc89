// What a trainer says of its buffers, held against what its session expects; and the device memory of one rank from its
// registration until the session is READY.
#ifndef DMUON_SERVER_SESSION_REGISTRATION_H_
#define DMUON_SERVER_SESSION_REGISTRATION_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/backend.h"
#include "server/session/types.h"

namespace dmuon::server {

struct ExpectedBuffers {
  uint64_t control_bytes = 0;
  uint64_t grad_bytes = 0;
  uint64_t weight_bytes = 0;
  bool by_handle = false;  // GRAD and WEIGHT are device memory of the trainer
  std::string device;      // with handles: where the rank's slot works
};

// INVALID_ARGUMENT or FAILED_PRECONDITION: the buffer, its field, the expected and the given. What only a driver knows is
// not looked at.
absl::Status CheckBuffers(const std::vector<Buffer>& buffers, const ExpectedBuffers& expected);

// GRAD and WEIGHT of one rank, mapped, with bytes that nobody else knows at the end of each.
class ImportedArenas {
 public:
  // Maps both. `registration` has passed CheckBuffers. Errors are those of Backend::Import, with the buffer's name.
  static absl::StatusOr<ImportedArenas> Import(kernels::Backend& backend,
                                               const Registration& registration);

  // Writes the bytes.
  absl::Status WriteProbes(kernels::Backend& backend, kernels::Stream stream) const;
  std::vector<Probe> probes() const;
  // FAILED_PRECONDITION: the trainer found something else.
  absl::Status CheckFound(const std::vector<std::string>& found) const;

  std::unique_ptr<kernels::ImportedMemory> grad, weight;

 private:
  std::string grad_nonce_, weight_nonce_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_SESSION_REGISTRATION_H_
