// What a step costs beside its mathematics: the trigger, calls, allocations, and everything else.
//
// The trigger is measured between two processes, as between trainer and daemon: this process holds the sessions and
// their worker threads, a forked child is the trainer, and a bare futex between the same two processes is measured in
// turn with it, so that both see the same machine. gRPC calls are counted against a real dmuond.
//
// Prints a table, and as its last line one JSON object.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "proto/wire/futex.h"
#include "server/session/session_table.h"
#include "tests/benchmark/allocation_count.h"
#include "tests/benchmark/let_sleep.h"
#include "tests/benchmark/timing_backend.h"
#include "tests/support/daemon_process.h"
#include "tests/support/local_trainer.h"
#include "tests/support/trainer.h"

namespace dmuon::bench {
namespace {

using server::testing::LocalTrainer;

constexpr int kTriggers = 2000;
constexpr int kWarmSteps = 10, kSteps = 60;
constexpr int kRanks = 2;
// The demo's model: projections of a small Llama.
constexpr int kDepth = 4, kWidth = 192, kHidden = 512;

// All that parent and child tell each other.
struct Shared {
  Times times;
  AllocationCount allocations;
  std::atomic<uint32_t> bare_word{0}, bare_sleeps{0}, bare_answer{0};
  std::atomic<bool> bare_stop{false};
  std::atomic<int64_t> bare_woken{0};
  int64_t trigger[kTriggers], bare[kTriggers];
  int64_t step[kSteps], math[kSteps];
};

void Check(bool good, const std::string& what) {
  if (good) return;
  fprintf(stderr, "latency_bench: %s\n", what.c_str());
  _exit(1);
}
void Check(const absl::Status& status) { Check(status.ok(), std::string(status.message())); }

double Percentile(std::vector<int64_t> values, double p) {
  std::sort(values.begin(), values.end());
  return static_cast<double>(
      values[static_cast<size_t>(p * static_cast<double>(values.size() - 1))]);
}

// The cores that this program was given. Asked before anything is pinned: the answer depends on that.
const std::vector<int>& Cores() {
  static const auto* const cores = [] {
    auto* list = new std::vector<int>;
    cpu_set_t set;
    Check(sched_getaffinity(0, sizeof(set), &set) == 0, "sched_getaffinity");
    for (int c = 0; c < CPU_SETSIZE; ++c) {
      if (CPU_ISSET(c, &set)) list->push_back(c);
    }
    return list;
  }();
  return *cores;
}

// Where the calling thread, and those that it starts from now on, may run. The trigger and the bare futex are measured
// from the first core to the last: a wake-up on the same core is another thing, and which one it is would be chance.
void PinTo(absl::Span<const int> cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int c : cores) CPU_SET(c, &set);
  sched_setaffinity(0, sizeof(set), &set);
}
void PinToFirst() { PinTo(absl::MakeConstSpan(Cores()).first(1)); }
void PinToLast() { PinTo(absl::MakeConstSpan(Cores()).last(1)); }
void Unpin() { PinTo(Cores()); }

// Ahead of all that is not real-time, where that is permitted: what other programs take would else be counted as ours.
bool AheadOfOthers() {
  const sched_param parameter = {.sched_priority = 10};
  return sched_setscheduler(0, SCHED_FIFO, &parameter) == 0;
}

// ---- sessions in this process --------------------------------------------------------------------------------------

server::OpenSpec TriggerSpec() {
  server::OpenSpec spec;
  spec.job = "trigger";
  spec.reshard_after_forward = false;
  spec.table.boundaries = {{"all", false}};
  spec.table.parameters = {{"bias", {64}, server::Route::kAdamw, server::BoundaryId(0), {}}};
  return spec;
}

server::OpenSpec DemoSpec() {
  server::OpenSpec spec;
  spec.job = "demo";
  spec.mesh.shard = kRanks;
  spec.reshard_after_forward = false;
  for (int layer = 0; layer < kDepth; ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    spec.table.boundaries.push_back({name, false});
    const auto add = [&](const char* leaf, int64_t rows, int64_t cols) {
      spec.table.parameters.push_back(
          {name + "." + leaf, {rows, cols}, server::Route::kMuon, server::BoundaryId(layer), {}});
    };
    for (const char* leaf : {"q_proj", "k_proj", "v_proj", "o_proj"}) add(leaf, kWidth, kWidth);
    add("gate_proj", kHidden, kWidth);
    add("up_proj", kHidden, kWidth);
    add("down_proj", kWidth, kHidden);
  }
  return spec;
}

void Start(LocalTrainer& trainer, const server::OpenSpec& spec) {
  const server::Route route = spec.table.parameters[0].route;
  Check(trainer.Open(spec));
  server::OptimizerSpec optimizer;
  optimizer.groups = {{"all", route}};
  optimizer.parameters.resize(spec.table.parameters.size());
  Check(trainer.Configure(optimizer));
  Check(trainer.Register());
  trainer.page().groups()[0] = {
      .lr = 0.02, .weight_decay = 0.1, .momentum = 0.95, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
}

// ---- the other side of the bare futex ------------------------------------------------------------------------------

void AnswerBare(Shared& shared) {
  PinToLast();
  while (!shared.bare_stop) {
    const uint32_t seen = shared.bare_answer;
    shared.bare_sleeps = 1;
    wire::FutexWait(shared.bare_word, seen, absl::Milliseconds(100));
    shared.bare_sleeps = 0;
    if (shared.bare_word == seen) continue;
    shared.bare_woken = NowNanos();
    ++shared.bare_answer;
    wire::FutexWakeAll(shared.bare_answer);
  }
}

// ---- the child: a trainer ------------------------------------------------------------------------------------------

int64_t BareTrigger(Shared& shared) {
  LetSleep(shared.bare_sleeps);
  const uint32_t answer = shared.bare_answer;
  const int64_t begin = NowNanos();
  ++shared.bare_word;
  wire::FutexWakeAll(shared.bare_word);
  while (shared.bare_answer == answer)
    wire::FutexWait(shared.bare_answer, answer, absl::Milliseconds(100));
  return shared.bare_woken - begin;
}

int64_t RecordTrigger(Shared& shared, LocalTrainer& trainer, uint32_t micro) {
  LetSleep(trainer.page().header().daemon_sleeps);
  shared.times.armed = true;
  const int64_t begin = NowNanos();
  trainer.Ready(0, micro);
  Check(trainer.AwaitConsumed(0, micro));
  return shared.times.first_work_nanos - begin;
}

// One step of all ranks: all gradients, then STEP, until everything is published.
void DemoStep(std::vector<LocalTrainer*>& ranks, uint64_t step) {
  for (uint32_t b = kDepth; b-- > 0;) {
    for (LocalTrainer* rank : ranks) rank->Ready(b);
  }
  for (LocalTrainer* rank : ranks) {
    for (uint32_t p = 0; p < rank->page().layout().parameters; ++p) rank->page().SetPresent(p);
    rank->PushStep(step);
  }
  for (LocalTrainer* rank : ranks) Check(rank->AwaitVerdict());
  for (LocalTrainer* rank : ranks) Check(rank->AwaitWeights(step));
}

// First by the clock, then, in as many steps again, by processor time.
void MeasureSteps(Shared& shared, std::vector<LocalTrainer*>& ranks) {
  uint64_t step = 0;
  for (int i = 0; i < kWarmSteps; ++i) DemoStep(ranks, ++step);
  shared.allocations.counting = true;
  for (int i = 0; i < kSteps; ++i) {
    const int64_t before = shared.times.in_operations;
    const int64_t begin = NowNanos();
    DemoStep(ranks, ++step);
    shared.step[i] = NowNanos() - begin;
    shared.math[i] = shared.times.in_operations - before;
  }
  shared.allocations.counting = false;
  shared.times.cpu = true;
  for (int i = 0; i < kSteps; ++i) DemoStep(ranks, ++step);
}

void Child(Shared& shared, LocalTrainer& trigger, std::vector<LocalTrainer*>& demo) {
  PinToFirst();
  for (int i = 0; i < kTriggers; ++i) {
    shared.bare[i] = BareTrigger(shared);
    shared.trigger[i] = RecordTrigger(shared, trigger, static_cast<uint32_t>(i));
  }
  Unpin();
  MeasureSteps(shared, demo);
  _exit(0);
}

void MeasureInProcess(Shared& shared, std::string& kernel) {
  auto backend = kernels::CreateBackend("auto", static_cast<int>(Cores().size()));
  Check(backend.status());
  kernel = (*backend)->description();
  TimingBackend timing(**backend, shared.times);
  server::SessionTable table(timing, {});
  LocalTrainer trigger(table, 1, 0), first(table, 2, 0), second(table, 3, 1);
  PinToLast();
  Start(trigger, TriggerSpec());
  Unpin();
  std::thread other([&] { Start(second, DemoSpec()); });
  Start(first, DemoSpec());
  other.join();
  for (LocalTrainer* rank : {&first, &second}) {
    const auto& parameters = DemoSpec().table.parameters;
    for (size_t p = 0; p < parameters.size(); ++p) {
      const int64_t count = parameters[p].numel();
      rank->SetGrad(static_cast<int>(p),
                    dmuon::testing::Values(count, p + 100 * static_cast<uint64_t>(rank->rank())));
    }
  }
  CountAllocationsIn(&shared.allocations);
  std::vector<LocalTrainer*> demo = {&first, &second};
  const pid_t child = fork();
  if (child == 0) Child(shared, trigger, demo);
  std::thread bare([&] { AnswerBare(shared); });
  int status = 0;
  waitpid(child, &status, 0);
  shared.bare_stop = true;
  bare.join();
  CountAllocationsIn(nullptr);
  Check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child failed");
  for (LocalTrainer* trainer : {&trigger, &first, &second}) trainer->Close().IgnoreError();
}

double GrpcCallsPerStep() {
  dmuon::testing::DaemonProcess daemon(dmuon::testing::Program("dmuond"));
  auto ranks = dmuon::testing::StartAll(daemon.endpoint(), {.world = kRanks});
  Check(dmuon::testing::TrainAll(ranks, 5));
  uint64_t before = 0, after = 0;
  for (const auto& rank : ranks) before += rank->connection().grpc_calls();
  Check(dmuon::testing::TrainAll(ranks, 50));
  for (const auto& rank : ranks) after += rank->connection().grpc_calls();
  return static_cast<double>(after - before) / 50;
}

int Main() {
  SetLogLevel(LogLevel::kWarning);
  Cores();
  const char* priority = AheadOfOthers() ? "real-time" : "normal";
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Check(memory != MAP_FAILED, "mmap");
  Shared& shared = *new (memory) Shared();
  std::string kernel;
  MeasureInProcess(shared, kernel);

  const auto micros = [](const int64_t* values, double p) {
    return Percentile(std::vector<int64_t>(values, values + kTriggers), p) / 1e3;
  };
  std::vector<int64_t> rest;
  for (int i = 0; i < kSteps; ++i) rest.push_back(shared.step[i] - shared.math[i]);
  const double math = Percentile(std::vector<int64_t>(shared.math, shared.math + kSteps), 0.5);
  const double overhead = Percentile(rest, 0.5);
  // On a machine that others use too, what they take lands in the rest: the quietest steps and the processor time show
  // the daemon's own.
  const double quiet = Percentile(rest, 0.1) /
                       Percentile(std::vector<int64_t>(shared.math, shared.math + kSteps), 0.1);
  nlohmann::ordered_json figures = {
      {"trigger_p50_us", micros(shared.trigger, 0.5)},
      {"trigger_p99_us", micros(shared.trigger, 0.99)},
      {"trigger_over_futex", micros(shared.trigger, 0.5) / micros(shared.bare, 0.5)},
      {"grpc_calls_per_step", GrpcCallsPerStep()},
      {"allocations_per_step", static_cast<double>(shared.allocations.on_workers) / kSteps},
      {"overhead_over_math", overhead / math},
      {"overhead_over_math_quiet", quiet},
      {"overhead_over_math_cpu", static_cast<double>(shared.times.cpu_between) /
                                     static_cast<double>(shared.times.cpu_inside)},
      {"futex_p50_us", micros(shared.bare, 0.5)},
      {"futex_p99_us", micros(shared.bare, 0.99)},
      {"allocations_per_step_all_threads", static_cast<double>(shared.allocations.on_all) / kSteps},
      {"step_ms", Percentile(std::vector<int64_t>(shared.step, shared.step + kSteps), 0.5) / 1e6},
      {"math_ms", math / 1e6},
      {"priority", priority},
      {"backend", kernel}};
  const auto row = [&](const char* what, const char* key, const char* goal) {
    printf("%-58s %10.3f   %s\n", what, figures[key].get<double>(), goal);
  };
  printf("%s\n%s priority; %d triggers; %d steps of a %d-layer model of width %d on %d ranks\n\n",
         kernel.c_str(), priority, kTriggers, kSteps, kDepth, kWidth, kRanks);
  row("bare futex between two processes, p50, us", "futex_p50_us", "");
  row("bare futex between two processes, p99, us", "futex_p99_us", "");
  row("record to the daemon's first work, p50, us", "trigger_p50_us", "");
  row("record to the daemon's first work, p99, us", "trigger_p99_us", "");
  row("ratio of the medians", "trigger_over_futex", "goal <= 1.5");
  row("gRPC calls of a steady step", "grpc_calls_per_step", "goal 0");
  row("allocations of a steady step, worker threads", "allocations_per_step", "goal 0");
  row("allocations of a steady step, all threads", "allocations_per_step_all_threads", "");
  row("step, all gradients ready to all weights published, ms", "step_ms", "");
  row("of it in backend operations and copies, ms", "math_ms", "");
  row("the rest over that, medians", "overhead_over_math", "goal <= 0.03");
  row("the rest over that, lowest tenth", "overhead_over_math_quiet", "");
  row("the rest over that, processor time of the workers", "overhead_over_math_cpu", "");
  printf("%s\n", figures.dump().c_str());
  return 0;
}

}  // namespace
}  // namespace dmuon::bench

int main() { return dmuon::bench::Main(); }
