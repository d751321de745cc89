// What a step costs the host, and how long a record takes to the first kernel's result. The session, its worker and the CUDA
// backend are the real ones; arenas are memory of this process, registered with CUDA.
//
// On a GPU: times. On the stand-ins, whose device is then done with everything at once: also what was called, by their
// counters; the trigger is run there and means nothing.
//
// Prints a line for people and, as its last line, one JSON object.
#include <dirent.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "nlohmann/json.hpp"
#include "server/session/session_table.h"
#include "tests/benchmark/let_sleep.h"
#include "tests/fakes/fake_cudart.h"
#include "tests/support/local_trainer.h"

namespace dmuon::bench {
namespace {

using server::testing::LocalTrainer;

constexpr int kMatrices = 50, kInABoundary = 5, kWarmUp = 20, kSteps = 500;
constexpr int kTriggers = 500;

// What this program calls of CUDA's runtime, which the backend's module has loaded.
struct Runtime {
  int (*host_alloc)(void**, size_t, unsigned) = nullptr;
  int (*free_host)(void*) = nullptr;
  int (*host_register)(void*, size_t, unsigned) = nullptr;
  int (*host_unregister)(void*) = nullptr;
  // Of the stand-ins alone.
  void (*instant)(int) = nullptr;
  FakeCudaCounters (*counters)() = nullptr;
};

// The CUDA backend, but for where arenas come from, and where the mean of a trigger goes.
class HostArenas : public kernels::Backend {
 public:
  HostArenas(kernels::Backend& cuda, const Runtime& runtime) : cuda_(cuda), runtime_(runtime) {}

  // From now on memory is the host's, where a kernel's result is seen without waiting for the device.
  void AllocateOnHost() { on_host_ = true; }
  // Where the last mean went.
  const volatile float* mean() const { return mean_; }

  absl::string_view name() const override { return cuda_.name(); }
  std::string description() const override { return cuda_.description(); }
  absl::StatusOr<void*> Allocate(size_t bytes) override {
    if (!on_host_) return cuda_.Allocate(bytes);
    void* memory = nullptr;
    if (runtime_.host_alloc(&memory, bytes, 0) != 0)
      return absl::ResourceExhaustedError("cudaHostAlloc");
    std::memset(memory, 0, bytes);
    host_memory_.insert(memory);
    return memory;
  }
  void Free(void* memory) override {
    if (host_memory_.erase(memory) != 0)
      runtime_.free_host(memory);
    else
      cuda_.Free(memory);
  }
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
    mean_ = a.mean;
    cuda_.MeanOverRanks(s, a);
  }
  void Lookahead(kernels::Stream s, const kernels::LookaheadArgs& a) override {
    cuda_.Lookahead(s, a);
  }
  void MuonCommit(kernels::Stream s, const kernels::MuonCommitArgs& a) override {
    cuda_.MuonCommit(s, a);
  }
  void Adamw(kernels::Stream s, const kernels::AdamwArgs& a) override { cuda_.Adamw(s, a); }
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
  const Runtime& runtime_;
  std::atomic<bool> on_host_{false};
  std::atomic<const volatile float*> mean_{nullptr};
  std::set<void*> host_memory_;  // of one session at a time, made and given back by one thread
};

[[noreturn]] void Die(const absl::Status& status) {
  fprintf(stderr, "cuda_host: %s\n", status.ToString().c_str());
  exit(1);
}
void Require(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

Runtime FindRuntime() {
  void* library = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
  Runtime r;
  const auto find = [library](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
  };
  if (library == nullptr) Die(absl::FailedPreconditionError("the backend loaded no runtime"));
  find("cudaHostAlloc", &r.host_alloc);
  find("cudaFreeHost", &r.free_host);
  find("cudaHostRegister", &r.host_register);
  find("cudaHostUnregister", &r.host_unregister);
  find("fake_cuda_instant", &r.instant);
  find("fake_cuda_counters", &r.counters);
  return r;
}

// Kernels may read and write all sealed memory of this process, as the worker sees it and as the trainer does. Ends
// before the memory does: its addresses may be given out again.
class RegisteredArenas {
 public:
  explicit RegisteredArenas(const Runtime& runtime) : runtime_(runtime) {
    if (runtime.counters != nullptr) return;  // kernels of the stand-ins read any memory
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      uintptr_t begin = 0, end = 0;
      if (line.find("/memfd:") == std::string::npos || line.find(" rw") == std::string::npos)
        continue;
      if (sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2) continue;
      void* const base = reinterpret_cast<void*>(begin);
      const int code = runtime.host_register(base, end - begin, 0);
      if (code != 0)
        Die(absl::InternalError(absl::StrCat("cudaHostRegister answers ", code, " for ", line)));
      bases_.push_back(base);
    }
  }
  ~RegisteredArenas() {
    for (void* base : bases_) runtime_.host_unregister(base);
  }
  RegisteredArenas(const RegisteredArenas&) = delete;
  RegisteredArenas& operator=(const RegisteredArenas&) = delete;

 private:
  const Runtime& runtime_;
  std::vector<void*> bases_;
};

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

// With the registration of its arenas, which ends before the session is closed.
std::unique_ptr<RegisteredArenas> Start(LocalTrainer& trainer, const Runtime& runtime,
                                        const server::OpenSpec& table) {
  Require(trainer.Open(table));
  server::OptimizerSpec optimizer;
  optimizer.groups = {{"all", table.table.parameters.front().route}};
  optimizer.parameters.assign(table.table.parameters.size(), {});
  Require(trainer.Configure(optimizer));
  auto arenas = std::make_unique<RegisteredArenas>(runtime);
  Require(trainer.Register());
  return arenas;
}

nlohmann::json MeasureSteps(server::SessionTable& table, const Runtime& runtime) {
  LocalTrainer trainer(table, 1, 0);
  auto arenas = Start(trainer, runtime, Table());
  if (runtime.instant != nullptr) runtime.instant(1);
  uint64_t step = 0;
  while (step < kWarmUp) OneStep(trainer, ++step);

  const auto count = [&] { return runtime.counters ? runtime.counters() : FakeCudaCounters{}; };
  const FakeCudaCounters before = count();
  const int64_t cpu = WorkerNanos();
  std::vector<double> wall;
  for (int i = 0; i < kSteps; ++i) {
    const absl::Time start = absl::Now();
    OneStep(trainer, ++step);
    wall.push_back(absl::ToDoubleMilliseconds(absl::Now() - start));
  }
  const double host_ms = static_cast<double>(WorkerNanos() - cpu) * 1e-6 / kSteps;
  const FakeCudaCounters after = count();
  if (runtime.instant != nullptr) runtime.instant(0);
  arenas.reset();
  Require(trainer.Close());
  std::sort(wall.begin(), wall.end());
  nlohmann::json result = {{"matrices", kMatrices},
                           {"steps", kSteps},
                           {"host_ms_per_step", host_ms},
                           {"wall_ms_per_step_p50", wall[kSteps / 2]}};
  if (runtime.counters != nullptr) {
    const auto each = [](uint64_t a, uint64_t b) { return static_cast<double>(b - a) / kSteps; };
    result["allocations_per_step"] = each(before.allocations, after.allocations);
    result["synchronisations_per_step"] = each(before.waits, after.waits);
    result["created_per_step"] = each(before.created, after.created);
    result["launches_per_step"] = each(before.launches, after.launches);
    result["kernels_loaded_late"] = after.lazy_loads;
    result["default_stream_uses"] = after.default_stream_uses - before.default_stream_uses;
  }
  return result;
}

// From a record of READY to the first kernel's result, seen from the host: it contains the kernel itself.
std::vector<double> MeasureTriggers(server::SessionTable& table, HostArenas& backend,
                                    const Runtime& runtime) {
  server::OpenSpec spec = Table();
  spec.job = "trigger";
  spec.table.boundaries.resize(1);
  spec.table.parameters.resize(1);
  spec.table.parameters[0].shape = {64};
  spec.table.parameters[0].route = server::Route::kAdamw;
  backend.AllocateOnHost();
  LocalTrainer trainer(table, 2, 0);
  auto arenas = Start(trainer, runtime, spec);
  trainer.SetGrad(0, std::vector<float>(64, 1));
  std::vector<double> micros;
  for (uint32_t micro = 0; micro < kTriggers; ++micro) {
    LetSleep(trainer.page().header().daemon_sleeps);
    const volatile float* mean = backend.mean();
    const float before = micro == 0 ? 0 : *mean;
    const absl::Time start = absl::Now();
    trainer.Ready(0, micro);
    // Each micro adds 1. Of the first it is not known yet where it goes.
    while (micro != 0 && *mean == before) {
      if (absl::Now() > start + absl::Seconds(10))
        Die(absl::DeadlineExceededError("no kernel wrote the mean"));
    }
    if (micro != 0) micros.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    Require(trainer.AwaitConsumed(0, micro));
  }
  arenas.reset();
  Require(trainer.Close());
  std::sort(micros.begin(), micros.end());
  return micros;
}

// What no machine's load can change.
bool Holds(const nlohmann::json& result) {
  constexpr double kLaunchesOfAParameter = 6;  // docs/gpu.md, "A step on a device"
  bool holds = true;
  const auto at_most = [&](const char* name, double most) {
    if (result[name].get<double>() <= most) return;
    fprintf(stderr, "cuda_host: %s: expected at most %g, got %g\n", name, most,
            result[name].get<double>());
    holds = false;
  };
  at_most("allocations_per_step", 0);
  at_most("created_per_step", 0);
  at_most("kernels_loaded_late", 0);
  at_most("default_stream_uses", 0);
  at_most("synchronisations_per_step", 1);
  at_most("launches_per_step", kMatrices * kLaunchesOfAParameter);
  return holds;
}

int Run() {
  auto cuda = kernels::CreateBackend("cuda", 1);
  Require(cuda.status());
  const Runtime runtime = FindRuntime();
  HostArenas backend(**cuda, runtime);
  server::SessionTable table(backend, {});
  nlohmann::json result = MeasureSteps(table, runtime);
  const std::vector<double> triggers = MeasureTriggers(table, backend, runtime);
  printf(
      "%s\na step of %d matrices: %.3f ms of the worker's thread, %.3f ms from the first READY to "
      "the last weight (median)\n",
      backend.description().c_str(), kMatrices, result["host_ms_per_step"].get<double>(),
      result["wall_ms_per_step_p50"].get<double>());
  if (runtime.counters == nullptr) {
    result["trigger_us_p50"] = triggers[triggers.size() / 2];
    result["trigger_us_p99"] = triggers[triggers.size() * 99 / 100];
    printf("a record to the first kernel's result: %.1f us (median)\n",
           triggers[triggers.size() / 2]);
  } else {
    printf("on the stand-ins: %.1f launches, %.2f waits\n",
           result["launches_per_step"].get<double>(),
           result["synchronisations_per_step"].get<double>());
  }
  printf("%s\n", result.dump().c_str());
  return runtime.counters == nullptr || Holds(result) ? 0 : 1;
}

}  // namespace
}  // namespace dmuon::bench

int main() { return dmuon::bench::Run(); }
