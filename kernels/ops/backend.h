// The operations that a step is made of, and the memory they run on: the seam between dmuon and a device.
//
// A backend is stateless apart from what it found out about the machine; every method may be called from any worker at
// once. Each operation is enqueued on a stream and may return before it is done; results, also scalars, are valid after
// Synchronize, or once a mark behind it is reached. Nothing here allocates except Allocate, and nothing here throws or fails
// for reasons of data: NaN and Inf go through. Pointers are to memory that this backend can read: its own, or a mapped
// arena.
#ifndef DMUON_KERNELS_OPS_BACKEND_H_
#define DMUON_KERNELS_OPS_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/ops/block_norm.h"
#include "kernels/ops/dtype.h"

namespace dmuon::kernels {

// An order of execution on the device. On the CPU there is only the calling thread, and nothing in here.
struct Stream {
  void* handle = nullptr;
};

// mean = (accumulate ? mean : 0) + (inputs[0] + inputs[1] + ...) / divisor, summed in the order given, in fp32.
// square_sum: sum of squares of the new mean, in float64, in an order that depends on nothing but count.
struct MeanArgs {
  absl::Span<const void* const> inputs;  // each `count` elements of `dtype`
  Dtype dtype = Dtype::kF32;
  int64_t count = 0;
  float divisor = 1;
  bool accumulate = false;
  float* mean = nullptr;
  double* square_sum = nullptr;  // backend-visible; valid after Synchronize
};

// Operations on the blocks of a parameter take those of one shape together: where each starts, in elements, the same in all
// arrays; `count` is of the elements of one.
inline constexpr int64_t kOneBlock[] = {0};

// U = c G + mu (mu M + c G) with nesterov, else mu M + c G. M and G keep their bytes.
struct LookaheadArgs {
  const float* momentum = nullptr;  // M
  const float* gradient = nullptr;  // G
  float* update = nullptr;          // U
  absl::Span<const int64_t> offsets = kOneBlock;
  int64_t count = 0;
  float mu = 0;
  float clip = 1;  // c
  bool nesterov = true;
  BlockNorm* norms = nullptr;     // optional, of each block: what Newton-Schulz begins with
  double* square_sums = nullptr;  // optional, beside norms: ||U||_F^2 once more, to be kept
};

// The commit of a muon parameter's blocks, in one pass over memory:
// M = mu M + c G;  W = W (1 - decay) - scale O;  and the published copy, if given, is W rounded.
struct MuonCommitArgs {
  float* momentum = nullptr;
  const float* gradient = nullptr;
  float* weight = nullptr;
  const float* orthogonal = nullptr;  // O
  absl::Span<const int64_t> offsets = kOneBlock;
  int64_t count = 0;
  float mu = 0;
  float clip = 1;
  float decay = 0;            // eta lambda
  float scale = 0;            // eta s
  void* published = nullptr;  // optional: W rounded to `published_dtype`
  Dtype published_dtype = Dtype::kF32;
  double* square_sums = nullptr;  // optional, of each block: ||O||_F^2
};

// Of each block, an estimate of ||O O^T - I||_F^2 / m for a dense O of m = rows <= cols, of ||O^T O - I||_F^2 / m for a tall
// one. Telemetry: no result depends on it.
struct OrthogonalityArgs {
  const float* orthogonal = nullptr;  // O
  absl::Span<const int64_t> offsets = kOneBlock;
  int64_t rows = 0, cols = 0;
  double* square_errors = nullptr;
};

// PyTorch's AdamW with decoupled decay; `step` counts from 1.
struct AdamwArgs {
  float* weight = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  const float* gradient = nullptr;
  int64_t count = 0;
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  int64_t step = 1;
};

class NewtonSchulz;
struct NewtonSchulzOptions;

// What a stream holds by itself. The rest that it is made of (events, the driver's own) no plan counts.
struct StreamMemory {
  size_t device_bytes = 0;
  size_t page_locked_bytes = 0;  // of the host
};

struct NewtonSchulzMemory {
  size_t workspace_bytes = 0;  // the plan's batch_workspace_bytes
  size_t planning_bytes = 0;   // of the device, while the plan is made
};

// What two processes that share a device's memory must agree on; 1000 * major + 10 * minor.
struct DeviceVersions {
  int driver = 0;
  int runtime = 0;
};

// Device memory that another process has allocated, as that process describes it.
struct MemoryHandle {
  std::string handle;   // of the whole allocation, as the device's runtime gives it
  std::string device;   // "GPU-8f6f..."
  uint64_t offset = 0;  // of what is shared in the allocation
  uint64_t size = 0;
  DeviceVersions versions;
};

// Another process's device memory, mapped here. Close, or else the destructor, closes the mapping, on any thread, and takes as
// long as the driver does; nothing that was enqueued may still use it. Where that fails, the other process must not free it.
class ImportedMemory {
 public:
  virtual ~ImportedMemory() = default;
  virtual absl::Status Close() = 0;  // once
  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 protected:
  ImportedMemory(std::byte* data, uint64_t size) : data_(data), size_(size) {}

 private:
  std::byte* const data_;
  const uint64_t size_;
};

class Backend {
 public:
  virtual ~Backend();

  virtual absl::string_view name() const = 0;  // "cpu"
  virtual std::string description()
      const = 0;  // "cpu: avx512_bf16 (own packed kernels), 2 threads"

  // Private memory, 256-byte aligned, zeroed. RESOURCE_EXHAUSTED when there is none.
  virtual absl::StatusOr<void*> Allocate(size_t bytes) = 0;
  virtual void Free(void* memory) = 0;

  virtual absl::StatusOr<Stream> CreateStream() = 0;
  virtual void DestroyStream(Stream stream) = 0;
  // Waits for all that was enqueued. Here, and in Reached, a device's failure is seen.
  virtual absl::Status Synchronize(Stream stream) = 0;
  // A mark behind all that was enqueued so far, and whether the device has passed it, without waiting. Where operations
  // are done when they return, every mark is passed.
  virtual uint64_t Mark(Stream stream);
  virtual absl::StatusOr<bool> Reached(Stream stream, uint64_t mark);

  virtual void CopyToHost(Stream stream, void* host, const void* device, size_t bytes) = 0;
  virtual void CopyFromHost(Stream stream, void* device, const void* host, size_t bytes) = 0;
  // Within the memory of this device.
  virtual void Copy(Stream stream, void* to, const void* from, size_t bytes) = 0;

  virtual void MeanOverRanks(Stream stream, const MeanArgs& args) = 0;
  virtual void Lookahead(Stream stream, const LookaheadArgs& args) = 0;
  virtual void MuonCommit(Stream stream, const MuonCommitArgs& args) = 0;
  virtual void Adamw(Stream stream, const AdamwArgs& args) = 0;
  virtual void Orthogonality(Stream stream, const OrthogonalityArgs& args) = 0;
  // to = from rounded to nearest even in `dtype`.
  virtual void Publish(Stream stream, const float* from, Dtype dtype, void* to, int64_t count) = 0;

  // ---- devices, and memory of other processes. One that computes in the host's memory leaves these as they are.

  // Whether a trainer allocates its arenas on a device and hands over handles (Import); else it is given sealed memory.
  virtual bool shares_by_handle() const { return false; }
  // This backend's device as other processes name it; empty without one. And what Import expects of them.
  virtual std::string device() const { return ""; }
  // The same as this process numbers it.
  virtual int ordinal() const { return 0; }
  virtual DeviceVersions versions() const { return {}; }
  // The backend on the device of that name, owned by this one. NOT_FOUND names the devices that there are.
  virtual absl::StatusOr<Backend*> OnDevice(absl::string_view device);
  // From now on operations here may use memory of `other`'s device. UNIMPLEMENTED where the hardware has no way.
  virtual absl::Status EnableAccess(const Backend& other);
  // Maps it. `handle` comes from a trainer: INVALID_ARGUMENT, NOT_FOUND or FAILED_PRECONDITION name the field, the
  // expected and the given, and nothing is mapped. May block for as long as the driver does.
  virtual absl::StatusOr<std::unique_ptr<ImportedMemory>> Import(const MemoryHandle& handle);
  // What keeps a device in use from ever working again in this process; asked now and then.
  virtual absl::Status Health() const { return absl::OkStatus(); }
  // Bytes that Allocate could still give; nullopt: ask the machine.
  virtual std::optional<uint64_t> available_bytes() const { return std::nullopt; }

  // What CreateStream takes.
  virtual StreamMemory MemoryOfStream() const { return {}; }
  // The iteration on this device, and before anything is allocated what it will take; callers use PlanNewtonSchulz and
  // PlanMemory (kernels/newton_schulz/newton_schulz.h), which validate first. A backend without one answers UNIMPLEMENTED.
  virtual absl::StatusOr<NewtonSchulzMemory> MemoryOfNewtonSchulz(
      const NewtonSchulzOptions& options, int64_t rows, int64_t cols, int64_t blocks) const;
  virtual absl::StatusOr<std::unique_ptr<NewtonSchulz>> MakeNewtonSchulz(
      const NewtonSchulzOptions& options, int64_t rows, int64_t cols, int64_t blocks);
};

// The explicit list of backends; contract tests run over it. "auto" takes the first that works on this machine and says
// why in `description`. `threads`: cores that all workers together may use. FAILED_PRECONDITION: a device that cannot be
// shared with trainers, and why.
absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(absl::string_view name, int threads);
absl::Span<const absl::string_view> BackendNames();

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_OPS_BACKEND_H_
