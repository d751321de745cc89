#include "tests/benchmark/timing_backend.h"

#include <time.h>

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"

namespace dmuon::bench {
namespace {

thread_local int64_t t_cpu_at_last_end = -1;

// Operations under way in this process, and since when there is at least one.
absl::Mutex g_mu(absl::kConstInit);
int g_under_way ABSL_GUARDED_BY(g_mu) = 0;
int64_t g_since ABSL_GUARDED_BY(g_mu) = 0;

// One operation, from construction to destruction.
class Timed {
 public:
  explicit Timed(Times& times) : times_(times), cpu_(times.cpu) {
    if (cpu_) {
      cpu_begin_ = ThreadCpuNanos();
      if (t_cpu_at_last_end >= 0) times_.cpu_between += cpu_begin_ - t_cpu_at_last_end;
    }
    const int64_t now = NowNanos();
    if (times_.armed.exchange(false)) times_.first_work_nanos = now;
    absl::MutexLock lock(&g_mu);
    if (g_under_way++ == 0) g_since = now;
  }
  ~Timed() {
    {
      absl::MutexLock lock(&g_mu);
      if (--g_under_way == 0) times_.in_operations += NowNanos() - g_since;
    }
    t_cpu_at_last_end = cpu_ ? ThreadCpuNanos() : -1;
    if (cpu_) times_.cpu_inside += t_cpu_at_last_end - cpu_begin_;
  }

 private:
  Times& times_;
  const bool cpu_;
  int64_t cpu_begin_ = 0;
};

int64_t Nanos(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

class TimedNewtonSchulz : public kernels::NewtonSchulz {
 public:
  TimedNewtonSchulz(std::unique_ptr<kernels::NewtonSchulz> plan, Times& times)
      : plan_(std::move(plan)), times_(times) {}
  size_t workspace_bytes() const override { return plan_->workspace_bytes(); }
  void Run(kernels::Stream stream, const float* in, float* out, void* workspace) const override {
    const Timed timed(times_);
    plan_->Run(stream, in, out, workspace);
  }
  void RunBatch(kernels::Stream stream, const kernels::NewtonSchulzBatch& batch) const override {
    const Timed timed(times_);
    plan_->RunBatch(stream, batch);
  }
  size_t batch_workspace_bytes(int64_t count) const override {
    return plan_->batch_workspace_bytes(count);
  }
  kernels::NsForm form() const override { return plan_->form(); }
  std::string kernel() const override { return plan_->kernel(); }

 private:
  const std::unique_ptr<kernels::NewtonSchulz> plan_;
  Times& times_;
};

}  // namespace

int64_t NowNanos() { return Nanos(CLOCK_MONOTONIC); }
int64_t ThreadCpuNanos() { return Nanos(CLOCK_THREAD_CPUTIME_ID); }

absl::Status TimingBackend::Synchronize(kernels::Stream stream) {
  const Timed timed(times_);
  return backend_.Synchronize(stream);
}
void TimingBackend::CopyToHost(kernels::Stream stream, void* host, const void* device,
                               size_t bytes) {
  const Timed timed(times_);
  backend_.CopyToHost(stream, host, device, bytes);
}
void TimingBackend::CopyFromHost(kernels::Stream stream, void* device, const void* host,
                                 size_t bytes) {
  const Timed timed(times_);
  backend_.CopyFromHost(stream, device, host, bytes);
}
void TimingBackend::Copy(kernels::Stream stream, void* to, const void* from, size_t bytes) {
  const Timed timed(times_);
  backend_.Copy(stream, to, from, bytes);
}
void TimingBackend::MeanOverRanks(kernels::Stream stream, const kernels::MeanArgs& args) {
  const Timed timed(times_);
  backend_.MeanOverRanks(stream, args);
}
void TimingBackend::Lookahead(kernels::Stream stream, const kernels::LookaheadArgs& args) {
  const Timed timed(times_);
  backend_.Lookahead(stream, args);
}
void TimingBackend::MuonCommit(kernels::Stream stream, const kernels::MuonCommitArgs& args) {
  const Timed timed(times_);
  backend_.MuonCommit(stream, args);
}
void TimingBackend::Adamw(kernels::Stream stream, const kernels::AdamwArgs& args) {
  const Timed timed(times_);
  backend_.Adamw(stream, args);
}
void TimingBackend::Orthogonality(kernels::Stream stream, const kernels::OrthogonalityArgs& args) {
  const Timed timed(times_);
  backend_.Orthogonality(stream, args);
}
void TimingBackend::Publish(kernels::Stream stream, const float* from, Dtype dtype, void* to,
                            int64_t count) {
  const Timed timed(times_);
  backend_.Publish(stream, from, dtype, to, count);
}

absl::StatusOr<std::unique_ptr<kernels::NewtonSchulz>> TimingBackend::MakeNewtonSchulz(
    const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols, int64_t blocks) {
  ASSIGN_OR_RETURN(auto plan, backend_.MakeNewtonSchulz(options, rows, cols, blocks));
  return std::make_unique<TimedNewtonSchulz>(std::move(plan), times_);
}

}  // namespace dmuon::bench
