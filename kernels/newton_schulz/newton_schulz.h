// The approximate polar factor of a matrix by a few matrix products: the two forms of docs/numerics.md.
#ifndef DMUON_KERNELS_NEWTON_SCHULZ_NEWTON_SCHULZ_H_
#define DMUON_KERNELS_NEWTON_SCHULZ_NEWTON_SCHULZ_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/ops/backend.h"

namespace dmuon::kernels {

enum class NsForm { kGram, kDirect };

struct CostTable;  // kernels/newton_schulz/cost_table.h

using Coefficients = std::array<double, 3>;  // a, b, c

struct NewtonSchulzOptions {
  NsForm form = NsForm::kGram;  // kGram: gram where it pays for the shape, direct for the rest
  int steps = 5;
  std::vector<Coefficients>
      coefficients;  // empty = Polar Express; shorter repeats its last, longer is cut
  std::optional<std::vector<int>> restarts;  // nullopt = derived from (set, steps, dtype)
  std::optional<Dtype> iteration_dtype;      // nullopt = the backend's default for the shape
  bool tf32 =
      false;  // the products of fp32 iterations take TF32 factors; with iteration_dtype fp32 alone
  bool deterministic = false;  // fp32 iterations
  // What the forms cost on this machine; null = not measured, and the form is chosen by the shape alone.
  std::shared_ptr<const CostTable> costs;
  // False for a plan that is only asked about: what a backend would choose by timing is its first choice.
  bool measure = true;
};

// Refuses, with the singular value at which it breaks, a custom set that diverges (docs/numerics.md, "Coefficients")
// and restarts that explode.
absl::Status Validate(const NewtonSchulzOptions& options);

// FLOPs of the form that will run on a rows x cols block, symmetric products at half cost.
double Flops(const NewtonSchulzOptions& options, int64_t rows, int64_t cols);

// Blocks of one shape, in one run.
struct NewtonSchulzBatch {
  const float* in = nullptr;
  float* out = nullptr;
  absl::Span<const int64_t> offsets;  // of each block, in elements, the same in both
  void* workspace = nullptr;          // batch_workspace_bytes(offsets.size())
  const BlockNorm* norms =
      nullptr;  // of each block, as Lookahead leaves them; null: found on the way
};

// The iteration for blocks of one shape. Made once, outside the step; Run allocates nothing.
class NewtonSchulz {
 public:
  virtual ~NewtonSchulz() = default;

  // Bytes of private memory that Run needs. One workspace serves any number of plans, one at a time.
  virtual size_t workspace_bytes() const = 0;
  // Makes RunBatch of this very batch cheaper to launch, where the device has a way to (a recorded graph): the same offsets
  // and addresses, whatever is there. Optional; outside the step, and never while Run is on. Writes `out`.
  virtual absl::Status Prepare(const NewtonSchulzBatch& /*batch*/) { return absl::OkStatus(); }
  // out = NS(in), both rows x cols, dense, row-major, fp32; `in` keeps its bytes; in == out is allowed.
  virtual void Run(Stream stream, const float* in, float* out, void* workspace) const = 0;
  // Run on each block; at once where the device gains by it. By default one after the other. The bits of a block are those
  // of Run: on the CPU of any plan, on a device, where what runs is chosen for a number of blocks, of this one.
  virtual void RunBatch(Stream stream, const NewtonSchulzBatch& batch) const;
  virtual size_t batch_workspace_bytes(int64_t /*count*/) const { return workspace_bytes(); }
  virtual NsForm form() const = 0;
  virtual std::string kernel() const = 0;  // "gram fp32", "direct bf16", ...
};

// `blocks`: how many RunBatch will be given; it takes any number. REQUIRES: Validate(options).ok(), rows >= 1, cols >= 1,
// blocks >= 1. The backend must outlive the plan.
absl::StatusOr<std::unique_ptr<NewtonSchulz>> PlanNewtonSchulz(Backend& backend,
                                                               const NewtonSchulzOptions& options,
                                                               int64_t rows, int64_t cols,
                                                               int64_t blocks = 1);
// What PlanNewtonSchulz with the same arguments will take. A function of them and the backend's settings alone.
absl::StatusOr<NewtonSchulzMemory> PlanMemory(const Backend& backend,
                                              const NewtonSchulzOptions& options, int64_t rows,
                                              int64_t cols, int64_t blocks = 1);

}  // namespace dmuon::kernels

#endif  // DMUON_KERNELS_NEWTON_SCHULZ_NEWTON_SCHULZ_H_
