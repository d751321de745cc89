// What a step costs the host: 50 matrices on the stand-ins for CUDA, whose device is done with everything at once. The session,
// its worker and the CUDA backend are the real ones; arenas are memory of this process, since nothing reads them.
//
// Prints a line for people and, as its last line, one JSON object.
#include <dirent.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "nlohmann/json.hpp"
#include "server/session/session_table.h"
#include "tests/fakes/fake_cudart.h"
#include "tests/support/local_trainer.h"

namespace dmuon::bench {
namespace {

using server::testing::LocalTrainer;

constexpr int kMatrices = 50, kInABoundary = 5, kWarmUp = 20, kSteps = 500;

// The CUDA backend, but for where arenas come from.
class HostArenas : public kernels::Backend {
 public:
  explicit HostArenas(kernels::Backend& cuda) : cuda_(cuda) {}
  absl::string_view name() const override { return cuda_.name(); }
  std::string description() const override { return cuda_.description(); }
  absl::StatusOr<void*> Allocate(size_t bytes) override { return cuda_.Allocate(bytes); }
  void Free(void* memory) override { cuda_.Free(memory); }
  absl::StatusOr<kernels::Stream> CreateStream() override { return cuda_.CreateStream(); }
  void DestroyStream(kernels::Stream s) override { cuda_.DestroyStream(s); }
  absl::Status Synchronize(kernels::Stream s) override { return cuda_.Synchronize(s); }
  uint64_t Mark(kernels::Stream s) override { return cuda_.Mark(s); }
  absl::StatusOr<bool> Reached(kernels::Stream s, uint64_t mark) override {
    return cuda_.Reached(s, mark);
  }
  void CopyToHost(kernels::Stream s, void* host, const void* device, size_t bytes) override {
    cuda_.CopyToHost(s, host, device, bytes);
  }
  void CopyFromHost(kernels::Stream s, void* device, const void* host, size_t bytes) override {
    cuda_.CopyFromHost(s, device, host, bytes);
  }
  void Copy(kernels::Stream s, void* to, const void* from, size_t bytes) override {
    cuda_.Copy(s, to, from, bytes);
  }
  void MeanOverRanks(kernels::Stream s, const kernels::MeanArgs& a) override {
    cuda_.MeanOverRanks(s, a);
  }
  void Lookahead(kernels::Stream s, const kernels::LookaheadArgs& a) override {
    cuda_.Lookahead(s, a);
  }
  void MuonCommit(kernels::Stream s, const kernels::MuonCommitArgs& a) override {
    cuda_.MuonCommit(s, a);
  }
  void Adamw(kernels::Stream s, const kernels::AdamwArgs& a) override { cuda_.Adamw(s, a); }
  bool measures_blocks() const override { return cuda_.measures_blocks(); }
  void Orthogonality(kernels::Stream s, const kernels::OrthogonalityArgs& a) override {
    cuda_.Orthogonality(s, a);
  }
  void Publish(kernels::Stream s, const float* from, Dtype dtype, void* to,
               int64_t count) override {
    cuda_.Publish(s, from, dtype, to, count);
  }
  kernels::StreamMemory MemoryOfStream() const override { return cuda_.MemoryOfStream(); }
  absl::StatusOr<kernels::NewtonSchulzMemory> MemoryOfNewtonSchulz(
      const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols,
      int64_t blocks) const override {
    return cuda_.MemoryOfNewtonSchulz(options, rows, cols, blocks);
  }
  absl::StatusOr<std::unique_ptr<kernels::NewtonSchulz>> MakeNewtonSchulz(
      const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols,
      int64_t blocks) override {
    return cuda_.MakeNewtonSchulz(options, rows, cols, blocks);
  }

 private:
  kernels::Backend& cuda_;
};

[[noreturn]] void Die(const absl::Status& status) {
  fprintf(stderr, "cuda_host: %s\n", status.ToString().c_str());
  exit(1);
}
void Require(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

// A function of the stand-in that the module has loaded.
template <typename F>
F* Fake(const char* name) {
  void* runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
  void* function = runtime != nullptr ? dlsym(runtime, name) : nullptr;
  if (function == nullptr) {
    Die(absl::FailedPreconditionError(
        "not on the stand-ins for CUDA: run it through scripts/bench.sh cuda_host"));
  }
  return reinterpret_cast<F*>(function);
}

// Nanoseconds that the worker's thread has run, by the kernel's account.
int64_t WorkerNanos() {
  DIR* tasks = opendir("/proc/self/task");
  int64_t nanos = 0;
  while (const dirent* task = readdir(tasks)) {
    const std::string folder = absl::StrCat("/proc/self/task/", task->d_name);
    std::string name;
    std::getline(std::ifstream(folder + "/comm") >> std::ws, name);
    if (name == "slot-0") std::ifstream(folder + "/schedstat") >> nanos;
  }
  closedir(tasks);
  return nanos;
}

server::OpenSpec Table() {
  server::OpenSpec spec;
  spec.job = "cuda_host";
  spec.reshard_after_forward = false;
  for (int b = 0; b < kMatrices / kInABoundary; ++b)
    spec.table.boundaries.push_back({absl::StrCat("layers.", b), false});
  for (int p = 0; p < kMatrices; ++p) {
    server::Parameter parameter;
    parameter.name = absl::StrCat("w", p);
    parameter.shape = {64, 96};
    parameter.route = server::Route::kMuon;
    parameter.boundary = server::BoundaryId(p / kInABoundary);
    spec.table.parameters.push_back(std::move(parameter));
  }
  return spec;
}

void OneStep(LocalTrainer& trainer, uint64_t step) {
  trainer.page().groups()[0] = {.lr = 0.02, .weight_decay = 0.1, .momentum = 0.95};
  for (int p = 0; p < kMatrices; ++p) trainer.page().SetPresent(static_cast<uint32_t>(p));
  for (int b = 0; b < kMatrices / kInABoundary; ++b) trainer.Ready(static_cast<uint32_t>(b));
  Require(trainer.Step(step));
}

int Run() {
  auto cuda = kernels::CreateBackend("cuda", 1);
  Require(cuda.status());
  auto* const instant = Fake<void(int)>("fake_cuda_instant");
  auto* const counters = Fake<FakeCudaCounters()>("fake_cuda_counters");
  HostArenas backend(**cuda);
  server::SessionTable table(backend, {});
  LocalTrainer trainer(table, 1, 0);
  Require(trainer.Open(Table()));
  server::OptimizerSpec optimizer;
  optimizer.groups = {{"muon", server::Route::kMuon}};
  optimizer.parameters.assign(kMatrices, {});
  Require(trainer.Configure(optimizer));
  Require(trainer.Register());
  instant(1);
  uint64_t step = 0;
  while (step < kWarmUp) OneStep(trainer, ++step);

  const FakeCudaCounters before = counters();
  const int64_t cpu = WorkerNanos();
  std::vector<double> wall;
  for (int i = 0; i < kSteps; ++i) {
    const absl::Time start = absl::Now();
    OneStep(trainer, ++step);
    wall.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
  }
  const double host_ms = static_cast<double>(WorkerNanos() - cpu) * 1e-6 / kSteps;
  const FakeCudaCounters after = counters();
  std::sort(wall.begin(), wall.end());
  const auto each = [](uint64_t a, uint64_t b) { return static_cast<double>(b - a) / kSteps; };
  const nlohmann::json result = {
      {"matrices", kMatrices},
      {"steps", kSteps},
      {"host_ms_per_step", host_ms},
      {"wall_ms_per_step_p50", wall[kSteps / 2]},
      {"allocations_per_step", each(before.allocations, after.allocations)},
      {"synchronisations_per_step", each(before.waits, after.waits)},
      {"created_per_step", each(before.created, after.created)},
      {"launches_per_step", each(before.launches, after.launches)},
      {"default_stream_uses", after.default_stream_uses - before.default_stream_uses}};
  printf(
      "a step of %d matrices: %.3f ms of the worker's thread, %.3f ms from the first READY to the "
      "last weight (median), "
      "%.1f launches, %.2f waits\n",
      kMatrices, host_ms, wall[kSteps / 2], each(before.launches, after.launches),
      each(before.waits, after.waits));
  printf("%s\n", result.dump().c_str());
  instant(0);
  return trainer.Close().ok() ? 0 : 1;
}

}  // namespace
}  // namespace dmuon::bench

int main() { return dmuon::bench::Run(); }
