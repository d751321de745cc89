// A backend that runs another one and keeps the time: when the first operation of a trigger began, and how long
// operations took.
#ifndef DMUON_TESTS_BENCHMARK_TIMING_BACKEND_H_
#define DMUON_TESTS_BENCHMARK_TIMING_BACKEND_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/newton_schulz/newton_schulz.h"
#include "kernels/ops/backend.h"

namespace dmuon::bench {

int64_t NowNanos();        // CLOCK_MONOTONIC, the same in all processes
int64_t ThreadCpuNanos();  // of the calling thread

// In memory that several processes share.
struct Times {
  std::atomic<bool> armed{false};  // set before a trigger; the first operation after it clears it
  std::atomic<int64_t> first_work_nanos{0};
  // How long at least one thread was in an operation. Not the sum, nor the most of any thread: where workers share cores,
  // one that waits while another computes is no overhead.
  std::atomic<int64_t> in_operations{0};
  // Processor time of all threads that run operations: in them, and between one and the next. Kept while `cpu` is set:
  // asking the kernel for it twice an operation takes as long as everything else between two operations.
  std::atomic<bool> cpu{false};
  std::atomic<int64_t> cpu_inside{0}, cpu_between{0};
};

class TimingBackend : public kernels::Backend {
 public:
  // Both must outlive it.
  TimingBackend(kernels::Backend& backend, Times& times) : backend_(backend), times_(times) {}

  absl::string_view name() const override { return backend_.name(); }
  std::string description() const override { return backend_.description(); }
  absl::StatusOr<void*> Allocate(size_t bytes) override { return backend_.Allocate(bytes); }
  void Free(void* memory) override { backend_.Free(memory); }
  absl::StatusOr<kernels::Stream> CreateStream() override { return backend_.CreateStream(); }
  void DestroyStream(kernels::Stream stream) override { backend_.DestroyStream(stream); }
  absl::Status Synchronize(kernels::Stream stream) override;
  void CopyToHost(kernels::Stream stream, void* host, const void* device, size_t bytes) override;
  void CopyFromHost(kernels::Stream stream, void* device, const void* host, size_t bytes) override;
  void Copy(kernels::Stream stream, void* to, const void* from, size_t bytes) override;
  void MeanOverRanks(kernels::Stream stream, const kernels::MeanArgs& args) override;
  void Lookahead(kernels::Stream stream, const kernels::LookaheadArgs& args) override;
  void MuonCommit(kernels::Stream stream, const kernels::MuonCommitArgs& args) override;
  void Adamw(kernels::Stream stream, const kernels::AdamwArgs& args) override;
  void Orthogonality(kernels::Stream stream, const kernels::OrthogonalityArgs& args) override;
  void Publish(kernels::Stream stream, const float* from, Dtype dtype, void* to,
               int64_t count) override;
  kernels::StreamMemory MemoryOfStream() const override { return backend_.MemoryOfStream(); }
  absl::StatusOr<kernels::NewtonSchulzMemory> MemoryOfNewtonSchulz(
      const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols,
      int64_t blocks) const override {
    return backend_.MemoryOfNewtonSchulz(options, rows, cols, blocks);
  }
  absl::StatusOr<std::unique_ptr<kernels::NewtonSchulz>> MakeNewtonSchulz(
      const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols,
      int64_t blocks) override;

 private:
  kernels::Backend& backend_;
  Times& times_;
};

}  // namespace dmuon::bench

#endif  // DMUON_TESTS_BENCHMARK_TIMING_BACKEND_H_
