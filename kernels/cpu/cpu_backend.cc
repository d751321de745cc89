#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/chunks.h"
#include "kernels/cpu/cpu_newton_schulz.h"
#include "kernels/cpu/orthogonality.h"
#include "kernels/cpu/pages.h"
#include "kernels/cpu/thread_pool.h"

namespace dmuon::kernels {
namespace {

using cpu::KernelTable;
using cpu::ThreadPool;

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& kernels, int threads, std::string why)
      : kernels_(kernels), pool_(threads), why_(std::move(why)) {}

  absl::string_view name() const override { return "cpu"; }
  std::string description() const override {
    return absl::StrCat("cpu: ", kernels_.name, " (own packed kernels), ", pool_.threads(),
                        pool_.threads() == 1 ? " thread" : " threads", why_.empty() ? "" : "; ",
                        why_);
  }

  absl::StatusOr<void*> Allocate(size_t bytes) override {
    void* const memory = cpu::AllocatePages(std::max<size_t>(bytes, 1));
    if (memory != nullptr) return memory;
    return absl::ResourceExhaustedError(
        absl::StrCat("cpu backend: no memory for ", bytes, " bytes"));
  }
  void Free(void* memory) override { cpu::FreePages(memory); }

  absl::StatusOr<Stream> CreateStream() override { return Stream{}; }
  void DestroyStream(Stream) override {}
  absl::Status Synchronize(Stream) override { return absl::OkStatus(); }

  void CopyToHost(Stream, void* host, const void* device, size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void CopyFromHost(Stream, void* device, const void* host, size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }

  void Copy(Stream, void* to, const void* from, size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  void MeanOverRanks(Stream, const MeanArgs& args) override {
    ThreadPool::Lease lease(pool_);
    double sum = 0;
    cpu::SumInChunks(
        pool_, 1, args.count,
        [&](int64_t, int64_t from, int64_t count) {
          return kernels_.mean(args.inputs.data(), static_cast<int64_t>(args.inputs.size()),
                               args.dtype, from, count, args.divisor, args.accumulate,
                               args.mean + from);
        },
        [&](int64_t, double chunk) { sum += chunk; });
    if (args.square_sum != nullptr) *args.square_sum = sum;
  }

  void Lookahead(Stream, const LookaheadArgs& args) override {
    ThreadPool::Lease lease(pool_);
    const auto blocks = static_cast<int64_t>(args.offsets.size());
    const auto run = [&](int64_t block, int64_t from, int64_t count) {
      const int64_t at = args.offsets[block] + from;
      kernels_.lookahead(args.momentum + at, args.gradient + at, args.update + at, count, args.mu,
                         args.clip, args.nesterov);
      // The chunk is still in the cache.
      return args.norms != nullptr ? cpu::NormOfChunk(kernels_, args.update + at, count)
                                   : BlockNorm();
    };
    if (args.norms != nullptr) std::fill_n(args.norms, blocks, BlockNorm());
    cpu::SumInChunks(pool_, blocks, args.count, run, [&](int64_t block, const BlockNorm& chunk) {
      if (args.norms != nullptr) cpu::Add(chunk, args.norms[block]);
    });
    for (int64_t i = 0; args.square_sums != nullptr && i < blocks; ++i)
      args.square_sums[i] = args.norms[i].square_sum;
  }

  void MuonCommit(Stream, const MuonCommitArgs& args) override {
    ThreadPool::Lease lease(pool_);
    const auto blocks = static_cast<int64_t>(args.offsets.size());
    const auto run = [&](int64_t block, int64_t from, int64_t count) {
      const int64_t at = args.offsets[block] + from;
      const double square_sum = kernels_.muon_commit(
          args.momentum + at, args.gradient + at, args.weight + at, args.orthogonal + at, count,
          args.mu, args.clip, 1 - args.decay, args.scale);
      // The chunk is still in the cache.
      if (args.published != nullptr) {
        kernels_.publish(
            args.weight + at, args.published_dtype,
            static_cast<std::byte*>(args.published) + at * ByteSize(args.published_dtype), count);
      }
      return square_sum;
    };
    if (args.square_sums != nullptr) std::fill_n(args.square_sums, blocks, 0.0);
    cpu::SumInChunks(pool_, blocks, args.count, run, [&](int64_t block, double chunk) {
      if (args.square_sums != nullptr) args.square_sums[block] += chunk;
    });
  }

  void Orthogonality(Stream, const OrthogonalityArgs& args) override {
    ThreadPool::Lease lease(pool_);
    pool_.Run(static_cast<int64_t>(args.offsets.size()), [&](int64_t i) {
      args.square_errors[i] = cpu::SampledOrthogonality(kernels_, args.orthogonal + args.offsets[i],
                                                        args.rows, args.cols);
    });
  }

  void Adamw(Stream, const AdamwArgs& args) override {
    const double correction1 = 1 - std::pow(args.beta1, static_cast<double>(args.step));
    const double correction2 = 1 - std::pow(args.beta2, static_cast<double>(args.step));
    const cpu::AdamwScalars scalars = {
        .keep = static_cast<float>(1 - args.lr * args.weight_decay),
        .beta1_weight = static_cast<float>(1 - args.beta1),
        .beta2 = static_cast<float>(args.beta2),
        .beta2_weight = static_cast<float>(1 - args.beta2),
        .correction2_sqrt = static_cast<float>(std::sqrt(correction2)),
        .eps = static_cast<float>(args.eps),
        .minus_step_size = static_cast<float>(-(args.lr / correction1)),
    };
    ForChunks(args.count, [&](int64_t from, int64_t count) {
      kernels_.adamw(args.weight + from, args.exp_avg + from, args.exp_avg_sq + from,
                     args.gradient + from, count, scalars);
    });
  }

  void Publish(Stream, const float* from, Dtype dtype, void* to, int64_t count) override {
    ForChunks(count, [&](int64_t start, int64_t n) {
      kernels_.publish(from + start, dtype, static_cast<std::byte*>(to) + start * ByteSize(dtype),
                       n);
    });
  }

  absl::StatusOr<NewtonSchulzMemory> MemoryOfNewtonSchulz(const NewtonSchulzOptions& options,
                                                          int64_t rows, int64_t cols,
                                                          int64_t blocks) const override {
    ASSIGN_OR_RETURN(const size_t workspace,
                     cpu::WorkspaceOnCpu(kernels_, pool_, options, rows, cols, blocks));
    return NewtonSchulzMemory{workspace, 0};
  }
  absl::StatusOr<std::unique_ptr<NewtonSchulz>> MakeNewtonSchulz(const NewtonSchulzOptions& options,
                                                                 int64_t rows, int64_t cols,
                                                                 int64_t /*blocks*/) override {
    return cpu::PlanOnCpu(kernels_, pool_, options, rows, cols);
  }

 private:
  template <typename Body>
  void ForChunks(int64_t count, const Body& body) {
    ThreadPool::Lease lease(pool_);
    pool_.Run(cpu::ChunksIn(count), [&](int64_t c) {
      const int64_t from = c * cpu::kChunk;
      body(from, std::min(cpu::kChunk, count - from));
    });
  }

  const KernelTable& kernels_;
  ThreadPool pool_;
  const std::string why_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(const CpuBackendOptions& options) {
  constexpr int kMaxThreads = 1024;
  if (options.threads < 1 || options.threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("cpu threads: expected 1 to ", kMaxThreads, ", given ", options.threads));
  }
  std::string kernel = options.kernel;
  const char* forced = std::getenv("DMUON_CPU_KERNEL");
  if (kernel.empty() && forced != nullptr) kernel = forced;
  ASSIGN_OR_RETURN(const KernelTable* kernels, cpu::FindKernels(kernel));
  return std::make_unique<CpuBackend>(*kernels, options.threads, options.why);
}

}  // namespace dmuon::kernels
