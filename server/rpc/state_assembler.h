// Puts the chunks of WriteState together, one state at a time, and trusts no size before it is checked.
#ifndef DMUON_SERVER_RPC_STATE_ASSEMBLER_H_
#define DMUON_SERVER_RPC_STATE_ASSEMBLER_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dmuon/v1/trainer.pb.h"
#include "server/session/types.h"

namespace dmuon::server::rpc {

class StateAssembler {
 public:
  // How many bytes the table says that a state has.
  using SizeOf =
      std::function<absl::StatusOr<uint64_t>(const std::string& parameter, StateKind kind)>;
  // Takes a state that is whole.
  using Write = std::function<absl::Status(const std::string& parameter, StateKind kind,
                                           absl::Span<const std::byte> data)>;

  StateAssembler(SizeOf size_of, Write write)
      : size_of_(std::move(size_of)), write_(std::move(write)) {}

  // INVALID_ARGUMENT names the parameter, the expected and the given.
  absl::Status Add(const v1::StateChunk& chunk);
  // The stream has ended: INVALID_ARGUMENT when a state is not whole.
  absl::Status Finish() const;
  int states_written() const { return written_; }

 private:
  absl::Status Begin(const v1::StateChunk& chunk);

  const SizeOf size_of_;
  const Write write_;
  bool open_ = false;  // a state has begun and is not whole
  std::string parameter_;
  StateKind kind_ = StateKind::kWeight;
  uint64_t total_ = 0;
  std::vector<std::byte> data_;
  int written_ = 0;
};

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_STATE_ASSEMBLER_H_
