// What the daemon computes in a step, called in a loop in one process: the same plans, prepared once, the same owners, the
// same number of threads over the same backend, and no record, arena, verdict or wake-up. For step.py, behind a C
// interface.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status_macros.h"
#include "kernels/ops/backend.h"
#include "server/placement/placement.h"
#include "server/placement/plan.h"
#include "server/route/route.h"

namespace dmuon::bench {
namespace {

using server::ParameterId;
using server::SlotId;

std::string& Error() {
  static thread_local std::string error;
  return error;
}

// One rank's gradients and weights.
struct Buffers {
  std::vector<float*> gradient, weight;  // by parameter
};

class Loop {
 public:
  static absl::StatusOr<std::unique_ptr<Loop>> Make(server::ParameterTable table, int ranks,
                                                    int threads) {
    std::unique_ptr<Loop> loop(new Loop);
    RETURN_IF_ERROR(server::CheckAndResolve(table));
    loop->table_ = std::move(table);
    ASSIGN_OR_RETURN(loop->backend_, kernels::CreateBackend("cpu", threads));
    loop->ranks_ = ranks;
    RETURN_IF_ERROR(loop->Prepare());
    return loop;
  }
  ~Loop() {
    for (void* memory : owned_) backend_->Free(memory);
  }

  // Seconds of the fastest of `steps` steps; the one before them is not counted.
  double Run(int steps) {
    std::barrier<> together(ranks_ + 1), verdict(ranks_);
    std::vector<std::thread> workers;
    for (int slot = 0; slot < ranks_; ++slot) {
      workers.emplace_back([&, slot] {
        for (int step = 0; step <= steps; ++step) {
          together.arrive_and_wait();
          Reduce(slot);
          verdict.arrive_and_wait();
          Update(slot);
          together.arrive_and_wait();
        }
      });
    }
    double best = 1e9;
    for (int step = 0; step <= steps; ++step) {
      const auto start = std::chrono::steady_clock::now();
      together.arrive_and_wait();
      together.arrive_and_wait();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (step > 0) best = std::min(best, took.count());
    }
    for (std::thread& worker : workers) worker.join();
    return best;
  }

 private:
  absl::StatusOr<float*> Floats(int64_t count) {
    ASSIGN_OR_RETURN(void* memory, backend_->Allocate(sizeof(float) * static_cast<size_t>(count)));
    owned_.push_back(memory);
    return static_cast<float*>(memory);
  }

  absl::Status Prepare() {
    const server::Mesh mesh{.shard = ranks_};
    plan_ = server::MakePlan(
        table_, mesh, server::Place(table_, mesh, server::Costs(table_, spec_.newton_schulz)));
    state_.resize(table_.parameters.size());
    updates_.resize(table_.parameters.size());
    buffers_.resize(ranks_);
    uint32_t random = 1;
    for (Buffers& rank : buffers_) {
      for (const server::Parameter& p : table_.parameters) {
        ASSIGN_OR_RETURN(float* gradient, Floats(p.numel()));
        ASSIGN_OR_RETURN(float* weight, Floats(p.numel()));
        for (int64_t i = 0; i < p.numel(); ++i) {
          random = random * 1664525 + 1013904223;
          gradient[i] = static_cast<float>(random >> 8) / (1 << 24) - 0.5f;
        }
        rank.gradient.push_back(gradient);
        rank.weight.push_back(weight);
      }
    }
    for (int slot = 0; slot < ranks_; ++slot) RETURN_IF_ERROR(PrepareSlot(slot));
    return absl::OkStatus();
  }

  absl::Status PrepareSlot(int slot) {
    size_t workspace_bytes = 0, sums = 0;
    plans_.push_back(std::make_unique<server::NewtonSchulzPlans>(*backend_, spec_));
    for (ParameterId p : plan_.owned[slot]) {
      const server::Parameter& parameter = table_.parameters[p.index()];
      ASSIGN_OR_RETURN(float* arrays, Floats(ArraysOf(parameter.route) * parameter.numel()));
      server::Assign(parameter.route, parameter.numel(), arrays, state_[p.index()]);
      server::PlannedUpdate& planned = updates_[p.index()];
      ASSIGN_OR_RETURN(planned.update,
                       server::MakeUpdate(*plans_.back(), parameter, state_[p.index()]));
      ASSIGN_OR_RETURN(const server::UpdateMemory memory,
                       server::PlanUpdate(*backend_, parameter, spec_));
      workspace_bytes = std::max(workspace_bytes, memory.workspace_bytes);
      sums += server::SumsOf(parameter);
    }
    ASSIGN_OR_RETURN(void* workspace, backend_->Allocate(workspace_bytes));
    owned_.push_back(workspace);
    ASSIGN_OR_RETURN(void* sum, backend_->Allocate(sizeof(double) * sums));
    owned_.push_back(sum);
    for (ParameterId p : plan_.owned[slot]) {
      server::PlannedUpdate& planned = updates_[p.index()];
      planned.place = {static_cast<std::byte*>(workspace), static_cast<double*>(sum)};
      RETURN_IF_ERROR(planned.update->Prepare(planned.place));
      sum = static_cast<double*>(sum) + server::SumsOf(table_.parameters[p.index()]);
    }
    return absl::OkStatus();
  }

  void Reduce(int slot) {
    std::vector<const void*> inputs(ranks_);
    for (ParameterId p : plan_.owned[slot]) {
      for (int rank = 0; rank < ranks_; ++rank) inputs[rank] = buffers_[rank].gradient[p.index()];
      double square_sum;
      backend_->MeanOverRanks({}, {.inputs = inputs,
                                   .count = table_.parameters[p.index()].numel(),
                                   .divisor = static_cast<float>(ranks_),
                                   .mean = state_[p.index()].gradient,
                                   .square_sum = &square_sum});
    }
  }

  void Update(int slot) {
    const server::UpdateInputs inputs{{.lr = 0.02, .momentum = 0.95}, 1};
    for (ParameterId p : plan_.owned[slot]) {
      const server::PlannedUpdate& planned = updates_[p.index()];
      planned.update->Compute({}, inputs, planned.place);
      planned.update->Commit({}, inputs, planned.place);
      for (const Buffers& rank : buffers_) {
        backend_->Publish({}, state_[p.index()].weight, Dtype::kF32, rank.weight[p.index()],
                          table_.parameters[p.index()].numel());
      }
    }
  }

  int ranks_ = 1;
  server::ParameterTable table_;
  server::OptimizerSpec spec_;
  server::Plan plan_;
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<std::unique_ptr<server::NewtonSchulzPlans>> plans_;  // by slot
  std::vector<server::ParameterState> state_;                      // by parameter
  std::vector<server::PlannedUpdate> updates_;                     // by parameter
  std::vector<Buffers> buffers_;                                   // by rank
  std::vector<void*> owned_;
};

}  // namespace
}  // namespace dmuon::bench

extern "C" {

const char* step_error() { return dmuon::bench::Error().c_str(); }

// Seconds of a step over `count` matrices, `per_layer` of them a boundary, or -1 with the reason in step_error().
double step_same_math(const int64_t* rows, const int64_t* cols, int count, int per_layer, int ranks,
                      int threads, int steps) {
  dmuon::server::ParameterTable table;
  for (int i = 0; i < count; ++i) {
    const int layer = i / per_layer;
    if (i % per_layer == 0) table.boundaries.push_back({"layers." + std::to_string(layer), false});
    table.parameters.push_back(
        {"layers." + std::to_string(layer) + "." + std::to_string(i % per_layer),
         {rows[i], cols[i]},
         dmuon::server::Route::kMuon,
         dmuon::server::BoundaryId(layer),
         {}});
  }
  auto loop = dmuon::bench::Loop::Make(std::move(table), ranks, threads);
  if (!loop.ok()) {
    dmuon::bench::Error() = std::string(loop.status().message());
    return -1;
  }
  return (*loop)->Run(steps);
}

}  // extern "C"
