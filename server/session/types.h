// What a session is told and what it answers, free of any wire format. server/rpc converts to and from the messages.
#ifndef DMUON_SERVER_SESSION_TYPES_H_
#define DMUON_SERVER_SESSION_TYPES_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/strong_id.h"
#include "base/unique_fd.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "kernels/ops/backend.h"
#include "proto/wire/attach_frame.h"
#include "server/parameter/parameter.h"
#include "server/placement/mesh.h"
#include "server/placement/placement.h"

namespace dmuon::server {

using AttachmentId =
    StrongId<struct AttachmentTag, uint64_t>;             // one attached process; never reused
using SessionId = StrongId<struct SessionTag, uint64_t>;  // never reused

// A trainer process, as the kernel vouches for it.
struct Trainer {
  AttachmentId attachment;
  uid_t uid = 0;
  pid_t pid = 0;
};

struct OpenSpec {
  std::string job;
  int rank = 0;
  Mesh mesh;
  bool reshard_after_forward = true;
  ParameterTable table;
  absl::Duration formation_timeout;  // zero = the daemon's default
};

struct Opened {
  SessionId id;
  uint64_t table_digest = 0;
  Placement placement;
  bool arenas_by_handle = false;  // trainers allocate GRAD and WEIGHT on their devices
};

enum class AdjustLr { kMatchRmsAdamw = 1, kOriginal = 2, kSpectral = 3, kNone = 4 };
enum class Nonfinite { kSkip = 1, kError = 2, kApply = 3 };

struct Group {
  std::string name;
  Route route = Route::kMuon;
  friend bool operator==(const Group&, const Group&) = default;
};

struct ParameterConfig {
  Dtype param_dtype = Dtype::kF32;
  Dtype grad_dtype = Dtype::kF32;
  int group = 0;
  friend bool operator==(const ParameterConfig&, const ParameterConfig&) = default;
};

struct OptimizerSpec {
  std::vector<Group> groups;
  std::vector<ParameterConfig> parameters;  // by parameter
  kernels::NewtonSchulzOptions newton_schulz;
  bool nesterov = true;
  AdjustLr adjust_lr = AdjustLr::kMatchRmsAdamw;
  Nonfinite nonfinite = Nonfinite::kSkip;
  std::string
      device;  // of this rank's slot; empty in the host's memory. The one thing that differs between ranks
};

// Where everything lies in the arenas. The same for all slots.
struct Layout {
  std::vector<uint64_t> grad_offset;    // by parameter, 256-byte aligned
  std::vector<uint64_t> weight_offset;  // by parameter, 256-byte aligned
  std::vector<int> window;              // by boundary; Z2: the boundary itself
  uint64_t grad_bytes = 0;
  uint64_t weight_bytes = 0;
  uint64_t control_bytes = 0;
};

// What a slot takes, known before any of it is allocated.
struct SlotMemory {
  // Where it computes.
  uint64_t grad_bytes = 0;
  uint64_t weight_bytes = 0;
  uint64_t state_bytes = 0;
  uint64_t workspace_bytes = 0;  // of its largest update, and of its streams
  uint64_t staging_bytes = 0;    // of exchanges, where devices cannot read each other
  // In the host's memory, wherever it computes.
  uint64_t control_bytes = 0;
  uint64_t page_locked_bytes = 0;  // what its streams' small copies go through
  // Where it computes, before anything of the above is there, and given back: what products are measured in.
  uint64_t planning_bytes = 0;

  uint64_t device_bytes() const {
    return grad_bytes + weight_bytes + state_bytes + workspace_bytes + staging_bytes;
  }
  uint64_t host_bytes() const { return control_bytes + page_locked_bytes; }
  uint64_t total() const { return device_bytes() + host_bytes(); }
};

struct Configured {
  Layout layout;
  SlotMemory memory;  // of the caller's slot
};

// A buffer as the trainer says that it mapped it, or made it.
struct Buffer {
  wire::ArenaKind kind = wire::ArenaKind::kUnspecified;
  uint64_t offset = 0;
  uint64_t size = 0;
  std::string ipc_handle = {};  // of device memory; else empty
  std::string device = {};      // where that is
};

struct Registration {
  std::vector<Buffer> buffers;
  kernels::DeviceVersions versions = {};  // of the trainer's process, with handles
};

// Where the daemon has written bytes for the trainer to find.
struct Probe {
  wire::ArenaKind kind = wire::ArenaKind::kUnspecified;
  uint64_t offset = 0;
  uint64_t size = 0;
};

struct Registered {
  uint64_t step = 0;  // the last committed one
  std::vector<Probe> probes;
};

// A mapped arena that can be handed to a trainer. The descriptor is a duplicate (F_DUPFD_CLOEXEC) and the caller's own: the
// session may close its own at any time, and its number may then name another session's memory.
struct ArenaHandle {
  UniqueFd fd;
  uint64_t bytes = 0;
};

enum class StateKind { kWeight = 1, kMomentum = 2, kExpAvg = 3, kExpAvgSq = 4, kStep = 5 };

enum class SessionState { kForming = 1, kOpen, kReady, kStepping, kDegraded, kDraining, kClosed };

// What one block did in one step; telemetry, which no result depends on.
struct BlockMeasures {
  bool ran =
      false;  // false: no rank had a gradient, or the step changed nothing, and what follows means nothing
  float norm = 0;                 // Frobenius, of U: what Newton-Schulz was given
  float update_rms = 0;           // of s O: what the learning rate scales
  float orthogonality_error = 0;  // estimate of ||O O^T - I||_F / sqrt(m)
};

// The same for every step: which rows of its parameter a block is, and what its Newton-Schulz runs.
struct BlockPlan {
  int index = 0;  // of the parameter's blocks
  Block rows;
  std::string form;    // "gram", "direct"
  std::string kernel;  // "gram mixed bf16 (avx512_bf16)"
};

struct BlockReport {
  std::string parameter;
  BlockPlan plan;
  BlockMeasures measures;
};

enum class StepOutcome { kApplied = 1, kSkippedNonfinite = 2, kFailed = 3 };

// What one step did and what it cost; durations in seconds, of the slowest slot.
struct StepReport {
  std::string session;
  uint64_t step = 0;
  StepOutcome outcome = StepOutcome::kApplied;
  absl::Status status;
  double total_norm = 0;
  double clip_coefficient = 1;
  double wait = 0;  // STEP record of the first rank to that of the last
  double reduce = 0;
  double verdict = 0;
  double update = 0;
  double publish = 0;
  double total = 0;  // last STEP record to the last published boundary
  int newton_schulz_calls = 0;
  std::string forms;
  std::string kernel;
  absl::Time at;
  std::vector<BlockReport>
      blocks;  // that ran; empty where not asked for, or not remembered any more
};

struct AttachmentStatus {
  int rank = 0;
  pid_t pid = 0;
  bool alive = false;
};

struct SessionDescription {
  std::string name;
  SessionState state = SessionState::kForming;
  uid_t uid = 0;
  Mesh mesh;
  bool reshard_after_forward = true;
  uint64_t step = 0;
  ParameterTable table;
  Placement placement;
  std::vector<AttachmentStatus> attachments;
  std::vector<SlotMemory> memory;  // by slot; empty before READY
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_SESSION_TYPES_H_
