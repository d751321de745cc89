// The C++ client of dmuond: connect, open a session, get views of gradients and weights, step.
//
// A trainer (one rank) does this:
//
//   auto connection = dmuon::Connection::Open("/run/dmuon");
//   auto session = (*connection)->OpenSession({.job = "run-7", .rank = r, .mesh = {.shard = n}, ...});   // collective
//   (*session)->Configure({.groups = ..., .parameters = ...});                                      // collective
//   for each parameter that this rank owns: (*session)->WriteState(name, StateKind::kWeight, values);
//   (*session)->Start();                                            // collective: version 0 is published to all ranks
//   for (;;) {
//     for each boundary, forward:  (*session)->WaitWeights(b);  ... (*session)->weight(p) ...
//     for each boundary, backward: (*session)->WaitGradWritable(b); ... fill (*session)->grad(p) ...; (*session)->Ready(b);
//     (*session)->EndBackward();
//     auto result = (*session)->Step({});
//   }
//
// Threads: a Connection may be used from any thread. A Session may be used from several (autograd's and the main one),
// except that Step, Discard, Configure, Start and Close come from one thread at a time. Waits hold no lock.
// Errors are absl::Status. What a trainer may do after each from Step:
//
//   INVALID_ARGUMENT     values that are out of range, or differ between ranks (groups, max_norm): set them right
//   FAILED_PRECONDITION  ranks differ in their backward passes or discards, or a gradient is not finite and the policy
//                        is kError; also what is called in the wrong order
//   DEADLINE_EXCEEDED    the rank(s) named did not come within the daemon's step_timeout
//   ABORTED              this rank came to a step that the others had given up; or a rank is gone, which it names. Then
//                        every later attempt fails at once, with ABORTED or UNAVAILABLE: close the session
//   UNAVAILABLE          the daemon is dead or drained, or the session has failed: the session is lost
//   CANCELLED            the interrupt check ended the wait, or the session has ended: the session is lost
//   anything else        a fault of the daemon or its device: the session is lost
//
// After the first four nothing has changed, and the gradients of this step are dropped on all ranks: run the backward
// again, and step; the id is the same. Only what Step refuses before it sends anything (max_norm out of range) leaves
// them where they are. A rank that got DEADLINE_EXCEEDED and the late one that gets ABORTED meet again in the next
// attempt. Of a lost session nothing but Close is left to call.
// Memory: shapes are logical and row-major; bytes of fp32 are little endian. Nothing here allocates in a steady step.
#ifndef DMUON_CLIENT_DMUON_CLIENT_H_
#define DMUON_CLIENT_DMUON_CLIENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace dmuon {

namespace client {

enum class Route { kMuon = 1, kAdamw = 2, kShardedAdamw = 3 };
enum class Dtype { kF32 = 1, kBF16 = 2, kF16 = 3 };
enum class AdjustLr { kMatchRmsAdamw = 1, kOriginal = 2, kSpectral = 3, kNone = 4 };
enum class Nonfinite { kSkip = 1, kError = 2, kApply = 3 };
enum class NsForm { kGram = 1, kDirect = 2 };
enum class StateKind { kWeight = 1, kMomentum = 2, kExpAvg = 3, kExpAvgSq = 4, kStep = 5 };

// rank = (replicate * shard_size + shard) * tp_size + tp.
struct Mesh {
  int replicate = 1;
  int shard = 1;
  int tp = 1;
};

struct Boundary {
  std::string name;  // fully qualified module name; "" is the root
  bool exclusive_window =
      false;  // Z3: never shares its window (the root, and boundaries that contain others)
};

struct Block {
  int64_t row_begin = 0;
  int64_t row_end = 0;
};

struct Parameter {
  std::string name;            // unique in the session, <= 256 bytes
  std::vector<int64_t> shape;  // full, logical
  Route route = Route::kMuon;
  int boundary = 0;  // index into the boundaries
  std::vector<Block>
      blocks;  // muon; empty = the whole parameter (three dimensions: one for each leading index)
};

struct OpenOptions {
  std::string job;  // the same on all ranks; names the session
  int rank = 0;
  Mesh mesh;
  bool reshard_after_forward = false;  // Z3: Materialize and Release windows
  std::vector<Boundary> boundaries;
  std::vector<Parameter> parameters;
  absl::Duration formation_timeout = absl::ZeroDuration();  // zero = the daemon's default
  uint32_t restart_count = 0;
  std::string coordinator;  // rank 0's daemon; empty = this one
  // Where the daemon computes on GPUs: the device of the arenas, as this process counts them; nullopt = the calling
  // thread's current one in Configure.
  std::optional<int> device;
};

// A cudaStream_t; null is the default stream. What was enqueued on it so far comes before what is asked for.
struct DeviceStream {
  void* handle = nullptr;
};

struct PlacementEntry {
  int owner = 0;  // rank whose slot holds the state
  double cost =
      0;  // Newton-Schulz and bytes: seconds where the daemon's machine was calibrated, else FLOPs
};

struct Placement {
  std::vector<PlacementEntry> parameters;  // in the order of the table
  std::vector<double> loads;               // cost of each slot
  double imbalance = 1;                    // max / mean
  double lower_bound = 0;
};

struct Group {
  std::string name;
  Route route = Route::kMuon;
};

// A group's values for the coming steps. Every rank must set the same.
struct Hyper {
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0.95;  // muon
  double beta1 = 0.9;      // adamw
  double beta2 = 0.999;    // adamw
  double eps = 1e-8;       // adamw
};

struct ParameterConfig {
  Dtype param_dtype = Dtype::kF32;
  Dtype grad_dtype = Dtype::kF32;
  int group = 0;
};

struct NewtonSchulzOptions {
  NsForm form = NsForm::kGram;
  int steps = 5;
  std::vector<std::array<double, 3>> coefficients;  // empty = Polar Express
  std::optional<std::vector<int>> restarts;         // nullopt = derived
  std::optional<Dtype> iteration_dtype;             // nullopt = the backend's default
  bool deterministic = false;                       // fp32 iterations
  bool tf32 = false;  // products take TF32 factors; with iteration_dtype kF32 alone, on GPUs
};

struct OptimizerOptions {
  std::vector<Group> groups;                // 1 to 64
  std::vector<ParameterConfig> parameters;  // in the order of the table
  NewtonSchulzOptions newton_schulz;
  bool nesterov = true;
  AdjustLr adjust_lr = AdjustLr::kMatchRmsAdamw;
  Nonfinite nonfinite = Nonfinite::kSkip;
};

struct StepOptions {
  bool found_inf = false;  // this rank saw a non-finite gradient elsewhere
  double max_norm = 0;     // clip the muon route to this global 2-norm; 0 = no clip
};

struct StepResult {
  uint64_t step = 0;
  bool applied = false;   // false: skipped for a non-finite gradient on some rank
  double total_norm = 0;  // 2-norm of the muon route's reduced gradients, before clipping
  double clip_coefficient = 1;
};

// What the last step cost in the daemon, seconds of the slowest slot.
struct StepProfile {
  uint64_t step = 0;
  double wait = 0, reduce = 0, verdict = 0, update = 0, publish = 0, total = 0;
  int newton_schulz_calls = 0;
  std::string forms;
  std::string kernel;
};

class Session;

class Connection {
 public:
  // Connects and attaches. `endpoint`: a directory of sockets, with or without "unix:". UNAVAILABLE: no daemon is
  // there, with what to do about it; DEADLINE_EXCEEDED: one is, and did not answer within `timeout`; PERMISSION_DENIED:
  // the sockets are not for this user; INVALID_ARGUMENT: `endpoint` is no directory.
  static absl::StatusOr<std::unique_ptr<Connection>> Open(
      const std::string& endpoint, absl::Duration timeout = absl::Seconds(5));
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Collective over the ranks of the job. The connection must outlive the session.
  absl::StatusOr<std::unique_ptr<Session>> OpenSession(OpenOptions options);

  const std::string& endpoint() const;
  const std::string& daemon_version() const;
  // gRPC calls made so far; a steady step makes none.
  uint64_t grpc_calls() const;
  // Asked about ten times a second by every thread that waits here or in a session of this connection; once it answers
  // true the wait ends with CANCELLED. A session whose Step ended so is lost. May be called from any thread.
  void SetInterruptCheck(std::function<bool()> interrupted);

  struct Impl;  // for the files of the library
  Impl& impl() { return *impl_; }

 private:
  explicit Connection(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class Session {
 public:
  ~Session();  // closes, if Close was not called
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Placement& placement() const;
  // Whether the daemon computes on GPUs, so that the arenas are device memory of this process.
  bool arenas_on_device() const;

  // Collective: gets layout and arenas, and maps them.
  absl::Status Configure(OptimizerOptions options);
  // Collective: READY after it; weights of the last committed step are published.
  absl::Status Start();

  // How many indices the calls below take: those of the table and of the groups, 0 before Configure.
  int parameters() const;
  int boundaries() const;
  int groups() const;

  // Views into the arenas, valid from Configure until the session is destroyed. Z3: a weight is valid between
  // Materialize and Release of its boundary. REQUIRES, here and below: an index of the table, after Configure.
  // Where the daemon computes on GPUs these are addresses of device(): the host must not touch them.
  std::byte* grad(int parameter) const;
  std::byte* weight(int parameter) const;
  int window(
      int boundary) const;  // Z3: boundaries with the same window cannot be materialised at once

  // The device of the arenas, as this process counts them; nullopt: the host's memory.
  std::optional<int> device() const;

  uint64_t step() const;        // last step that was answered
  uint64_t generation() const;  // of the gradients that are being collected; the first is 1

  // Returns once the weights of the last step are in the WEIGHT arena (Z2).
  absl::Status WaitWeights(int boundary);
  absl::Status WaitAllWeights();
  // Z3: fills the boundary's window, waiting for it; FAILED_PRECONDITION when another boundary holds the window.
  absl::Status Materialize(int boundary);
  absl::Status Release(int boundary);
  // The same once the device has come to what is on `stream` so far; returns at once.
  absl::Status Release(int boundary, DeviceStream stream);

  // Returns once the boundary's place in the GRAD arena may be written: its last micro was read (Z3: that of any
  // boundary with the same window).
  absl::Status WaitGradWritable(int boundary);
  // This parameter has a gradient in this generation.
  void SetPresent(int parameter);
  // The boundary's place in GRAD holds this micro's gradients, zeros where there are none.
  absl::Status Ready(int boundary);
  // The same once the device has come to what is on `stream` so far; returns at once. Step and Discard wait for all such
  // calls, WaitGradWritable and Materialize for those of the same window.
  absl::Status Ready(int boundary, DeviceStream stream);
  // A synchronised backward pass is over. Ranks must agree on their number at Step.
  void EndBackward();
  // zero_grad after a backward: drops what came for this generation.
  absl::Status Discard();

  void SetHyper(int group, const Hyper& hyper);
  // Collective. Sends STEP and returns after the verdict; publication goes on behind it.
  absl::StatusOr<StepResult> Step(const StepOptions& options);

  // By gRPC. Weights and moments are fp32, kStep is one int64. For weights the owner's values win: write on one rank,
  // and let the ranks meet before they read.
  absl::StatusOr<std::vector<std::byte>> ReadState(const std::string& parameter, StateKind kind);
  absl::Status WriteState(const std::string& parameter, StateKind kind,
                          absl::Span<const std::byte> data);
  absl::StatusOr<StepProfile> LastProfile();

  // Leaves the session. With the last rank its state is gone. The arenas stay, with what is in them. Idempotent.
  absl::Status Close();

  struct Impl;  // for the files of the library, and for tests that write records by hand
  explicit Session(std::unique_ptr<Impl> impl);
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// The daemon that a trainer uses when it is told none: DMUON_ENDPOINT, else /run/dmuon when its sockets are there, else
// nullopt.
std::optional<std::string> DefaultEndpoint();

}  // namespace client
}  // namespace dmuon

#endif  // DMUON_CLIENT_DMUON_CLIENT_H_
