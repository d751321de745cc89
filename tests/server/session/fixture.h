// A small job on a real SessionTable with the CPU backend: two matrices, one convolution-like stack and one vector.
#ifndef DMUON_TESTS_SERVER_SESSION_FIXTURE_H_
#define DMUON_TESTS_SERVER_SESSION_FIXTURE_H_

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/ops/backend.h"
#include "tests/support/local_trainer.h"

namespace dmuon::server::testing {

inline constexpr double kLr = 0.02, kMomentum = 0.95, kDecay = 0.1;

inline ParameterTable SmallTable() {
  ParameterTable t;
  t.boundaries = {{"layers.0", false}, {"layers.1", false}, {"", true}};
  t.parameters = {{"layers.0.w", {12, 20}, Route::kMuon, BoundaryId(0), {}},
                  {"layers.0.b", {20}, Route::kAdamw, BoundaryId(0), {}},
                  {"layers.1.w", {20, 8}, Route::kMuon, BoundaryId(1), {}},
                  {"head", {3, 6, 9}, Route::kMuon, BoundaryId(2), {}}};
  return t;
}

inline OpenSpec SmallSpec(const std::string& job, int ranks, bool z3 = false) {
  OpenSpec s;
  s.job = job;
  s.mesh.shard = ranks;
  s.reshard_after_forward = z3;
  s.table = SmallTable();
  return s;
}

inline OptimizerSpec SmallOptimizer() {
  OptimizerSpec s;
  s.groups = {{"default/muon", Route::kMuon}, {"default/adamw", Route::kAdamw}};
  for (const Parameter& p : SmallTable().parameters) {
    s.parameters.push_back({Dtype::kF32, Dtype::kF32, p.route == Route::kMuon ? 0 : 1});
  }
  s.newton_schulz.form = kernels::NsForm::kDirect;
  s.newton_schulz.deterministic = true;
  return s;
}

inline void SetGroups(const LocalTrainer& t, double lr = kLr) {
  t.page().groups()[0] = {.lr = lr, .weight_decay = kDecay, .momentum = kMomentum};
  t.page().groups()[1] = {
      .lr = 1e-3, .weight_decay = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
}

inline std::vector<float> Gaussian(size_t n, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

// Runs f(rank) on a thread each, and returns what they returned.
template <typename F>
std::vector<absl::Status> OnRanks(int ranks, F f) {
  std::vector<absl::Status> status(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back([&, r] { status[r] = f(r); });
  for (std::thread& t : threads) t.join();
  return status;
}

inline void ExpectAllOk(const std::vector<absl::Status>& status) {
  for (size_t r = 0; r < status.size(); ++r)
    EXPECT_TRUE(status[r].ok()) << "rank " << r << ": " << status[r];
}

class SessionTest : public ::testing::Test {
 protected:
  explicit SessionTest(SessionLimits limits = {.formation_timeout = absl::Seconds(20),
                                               .step_timeout = absl::Seconds(20)})
      : backend_(*kernels::CreateBackend("cpu", 2)),
        table_(std::make_unique<SessionTable>(*backend_, limits)) {}

  // Opens, configures, writes the same weights and registers on every rank.
  std::vector<std::unique_ptr<LocalTrainer>> Start(const std::string& job, int ranks,
                                                   bool z3 = false,
                                                   OptimizerSpec optimizer = SmallOptimizer()) {
    std::vector<std::unique_ptr<LocalTrainer>> trainers;
    for (int r = 0; r < ranks; ++r) {
      trainers.push_back(std::make_unique<LocalTrainer>(*table_, next_attachment_++, r));
    }
    ExpectAllOk(OnRanks(ranks, [&](int r) {
      LocalTrainer& t = *trainers[r];
      RETURN_IF_ERROR(t.Open(SmallSpec(job, ranks, z3)));
      RETURN_IF_ERROR(t.Configure(optimizer));
      const ParameterTable table = SmallTable();
      for (size_t p = 0; p < table.parameters.size(); ++p) {
        if (t.opened().placement.owner[p] != SlotId(r)) continue;
        RETURN_IF_ERROR(t.WriteWeight(table.parameters[p].name,
                                      Gaussian(table.parameters[p].numel(), 100 + p)));
      }
      RETURN_IF_ERROR(t.Register());
      SetGroups(t);
      return absl::OkStatus();
    }));
    return trainers;
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<SessionTable> table_;
  uint64_t next_attachment_ = 1;
};

}  // namespace dmuon::server::testing

#endif  // DMUON_TESTS_SERVER_SESSION_FIXTURE_H_
