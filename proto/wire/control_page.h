// The control page: the memory that one trainer and the daemon share to talk without a system call.
//
// A memfd that the daemon creates, sizes from the session's counts, seals (SHRINK | GROW | SEAL) and hands out over the
// attach socket. The trainer writes: ring and its tail, group table, presence bits, the daemon's doorbell. The daemon
// writes: ring head, completion words, verdict, norms, the trainer's doorbell. Neither side may rely on the other's
// good manners: the daemon keeps its own PageLayout and never reads the header back.
//
// Every word that one side waits for is followed by a bump of the other side's doorbell. Wake-ups are futex calls, made
// only when the sleeper said that it sleeps; every wait times out and looks again.
#ifndef DMUON_PROTO_WIRE_CONTROL_PAGE_H_
#define DMUON_PROTO_WIRE_CONTROL_PAGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/wire/records.h"

namespace dmuon::wire {

inline constexpr uint64_t kControlPageMagic = 0x4e4f554d44ull;  // "DMUON"
inline constexpr uint32_t kControlPageVersion = 1;
inline constexpr uint32_t kMaxGroups = 64;
inline constexpr uint32_t kMaxBoundaries = 1u << 16;
inline constexpr uint32_t kMaxParameters = 1u << 16;
inline constexpr uint32_t kReasonBytes = 952;

// One optimizer group as it is for the coming step. Compared over the ranks in the verdict.
struct GroupHyper {
  double lr = 0;
  double weight_decay = 0;
  double momentum = 0;  // muon
  double beta1 = 0;     // adamw
  double beta2 = 0;     // adamw
  double eps = 0;       // adamw
};
static_assert(sizeof(GroupHyper) == 48);

// What the daemon tells about one boundary.
struct alignas(64) BoundaryWords {
  // generation << 16 | (micro + 1) of the last micro whose gradients were read: they may be written over.
  std::atomic<uint64_t> grads_consumed{0};
  std::atomic<uint64_t> weights_version{
      0};  // step id of the weights that are published (Z3: that can be materialised)
  std::atomic<uint64_t> window_grant{0};  // ticket of the last MATERIALIZE that was filled (Z3)
};

// The value of grads_consumed once `micro` of `generation` was read.
constexpr uint64_t ConsumedMark(uint64_t generation, uint32_t micro) {
  return generation << 16 | (uint64_t{micro} + 1);
}

enum VerdictFlags : uint32_t {
  kApplied = 1u << 0,           // weights of this step id will be published
  kSkippedNonfinite = 1u << 1,  // found_inf somewhere: state bytes unchanged, version moves on
  kClipped = 1u << 2,
};

// The answer to a STEP. All fields are written before `answered`, which is written with release.
struct alignas(64) Verdict {
  std::atomic<uint64_t> answered{
      0};  // STEP records of this trainer that were answered: wait for the number sent
  uint64_t step = 0;
  uint64_t next_generation = 0;  // what the trainer collects from now on; the same on all ranks
  uint32_t code = 0;             // absl::StatusCode; `reason` says why when it is not OK
  uint32_t flags = 0;            // VerdictFlags
  double total_norm = 0;         // of the muon route's reduced gradients, 2-norm, before clipping
  double clip_coefficient = 1;
  char reason[kReasonBytes] = {};  // NUL-terminated
};

enum class SessionStatus : uint32_t { kOpen = 0, kFailed = 1 };

struct alignas(64) PageHeader {
  uint64_t magic = kControlPageMagic;
  uint32_t version = kControlPageVersion;
  uint32_t boundaries = 0;
  uint32_t parameters = 0;
  uint32_t groups = 0;
  uint32_t ring_capacity = 0;  // a power of two, >= 4 * boundaries
  uint32_t reserved = 0;
  uint64_t bytes = 0;
  uint64_t table_digest = 0;

  // Written by the trainer.
  alignas(64) std::atomic<uint64_t> ring_tail{0};
  std::atomic<uint32_t> daemon_doorbell{0};  // futex word
  // Written by the daemon.
  alignas(64) std::atomic<uint64_t> ring_head{0};
  std::atomic<uint32_t> trainer_doorbell{0};  // futex word
  std::atomic<uint32_t> daemon_sleeps{0};
  alignas(64) std::atomic<uint32_t> trainer_sleeps{0};  // number of sleeping threads
  alignas(64) std::atomic<uint64_t> epoch{0};
  std::atomic<uint32_t> status{0};     // SessionStatus
  std::atomic<uint64_t> done_step{0};  // every boundary of this step is published
  std::atomic<uint64_t> prepared{0};   // generation of the last PREPARE that was answered
  char failure[kReasonBytes] = {};     // why status is kFailed; written before it, NUL-terminated
  Verdict verdict;
};

// Offsets of the variable parts; a pure function of the counts, the same on both sides.
struct PageLayout {
  uint32_t boundaries = 0, parameters = 0, groups = 0, ring_capacity = 0;
  size_t ring = 0;      // Record[ring_capacity]
  size_t words = 0;     // BoundaryWords[boundaries]
  size_t hyper = 0;     // GroupHyper[groups]
  size_t presence = 0;  // uint64_t[ceil(parameters / 64)]: had a gradient in this generation
  size_t norms = 0;  // double[parameters]: 2-norm of each reduced gradient, after PREPARE or STEP
  size_t bytes = 0;  // a multiple of 4096

  static PageLayout For(uint32_t boundaries, uint32_t parameters, uint32_t groups);
};

// A view of a mapped page. A small value; does not own the mapping, which must outlive it.
class ControlPage {
 public:
  ControlPage() = default;
  ControlPage(std::byte* base, const PageLayout& layout) : base_(base), layout_(layout) {}

  // Daemon: writes a fresh header into zeroed memory.
  static ControlPage Create(std::byte* base, const PageLayout& layout, uint64_t table_digest);
  // Client: checks magic, version and counts against `bytes`, the size of the mapping.
  static absl::StatusOr<ControlPage> Attach(std::byte* base, size_t bytes);

  const PageLayout& layout() const { return layout_; }
  PageHeader& header() const { return *reinterpret_cast<PageHeader*>(base_); }
  BoundaryWords& boundary(uint32_t b) const {
    return reinterpret_cast<BoundaryWords*>(base_ + layout_.words)[b];
  }
  absl::Span<GroupHyper> groups() const {
    return {reinterpret_cast<GroupHyper*>(base_ + layout_.hyper), layout_.groups};
  }
  absl::Span<double> norms() const {
    return {reinterpret_cast<double*>(base_ + layout_.norms), layout_.parameters};
  }

  // Presence bits. Set and cleared by the trainer; read by the daemon after STEP.
  void SetPresent(uint32_t parameter) const;
  uint64_t PresenceWord(uint32_t word) const;  // bits of parameters 64 word .. 64 word + 63
  void ClearPresence() const;

  // Trainer. One producer at a time. False when the ring is full: wait on the trainer's doorbell, then try again.
  bool Push(const Record& record) const;
  // Daemon. The oldest unread record, copied out; nullopt when there is none. DATA_LOSS when the tail is impossible.
  absl::StatusOr<std::optional<Record>> Pop() const;

  // Ring the other side: bump its doorbell, and wake it if it sleeps.
  void RingDaemon() const;
  void RingTrainer() const;

  // Daemon: sleeps until its doorbell differs from `seen` or `timeout` passes.
  uint32_t DaemonDoorbell() const {
    return header().daemon_doorbell.load(std::memory_order_acquire);
  }
  void DaemonWait(uint32_t seen, absl::Duration timeout) const;
  // Trainer: the same; any number of threads.
  uint32_t TrainerDoorbell() const {
    return header().trainer_doorbell.load(std::memory_order_acquire);
  }
  void TrainerWait(uint32_t seen, absl::Duration timeout) const;

 private:
  std::byte* base_ = nullptr;
  PageLayout layout_;
};

}  // namespace dmuon::wire

#endif  // DMUON_PROTO_WIRE_CONTROL_PAGE_H_
