// Ranks of a job, over the real client: a small table, gradients that are a function of (rank, step), and threads.
#ifndef DMUON_TESTS_SUPPORT_TRAINER_H_
#define DMUON_TESTS_SUPPORT_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/dmuon/client.h"

namespace dmuon::testing {

struct JobOptions {
  std::string job = "job";
  int world = 1;
  bool z3 = false;
  absl::Duration formation_timeout = absl::ZeroDuration();
};

// Between the host and a session's arenas, wherever those are. The gradient is enqueued on the calling thread's stream, and
// Send makes READY wait for it.
absl::Status PutGradient(client::Session& session, int parameter, const void* host, size_t bytes);
absl::Status GetWeight(client::Session& session, int parameter, void* host, size_t bytes);
absl::Status SendReady(client::Session& session, int boundary);
absl::Status SendRelease(client::Session& session, int boundary);

// Two layers of a weight (muon) and a bias (adamw) each: parameters 0 to 3, boundaries 0 and 1.
client::OpenOptions SmallTable(const JobOptions& job, int rank);
// So many equal layers, each a boundary of one 32 x 32 matrix.
client::OpenOptions LayerTable(const JobOptions& job, int rank, int layers);
// Group 0 muon, group 1 adamw; fp32, direct form, fp32 iterations.
client::OptimizerOptions SmallOptimizer();
inline constexpr int kMuonGroup = 0, kAdamwGroup = 1;
inline constexpr client::Hyper kMuonHyper{.lr = 0.02, .weight_decay = 0.1, .momentum = 0.95};
inline constexpr client::Hyper kAdamwHyper{.lr = 0.003, .weight_decay = 0.01};

int64_t Elements(const client::Parameter& parameter);
// Between -1 and 1, the same for the same arguments everywhere.
std::vector<float> Values(int64_t count, uint64_t seed);
std::vector<float> InitialValues(const client::Parameter& parameter, int index);
std::vector<float> Gradient(const client::Parameter& parameter, int index, int rank, uint64_t step);

// One rank: a connection and a session that is READY.
class Trainer {
 public:
  // Collective. Connects, opens, configures, writes the initial values, starts.
  static absl::StatusOr<std::unique_ptr<Trainer>> Start(const std::string& endpoint,
                                                        const JobOptions& job, int rank);
  static absl::StatusOr<std::unique_ptr<Trainer>> Start(const std::string& endpoint,
                                                        client::OpenOptions table,
                                                        client::OptimizerOptions optimizer);

  client::Connection& connection() { return *connection_; }
  client::Session& session() { return *session_; }
  const std::vector<client::Parameter>& parameters() const { return table_.parameters; }
  int rank() const { return table_.rank; }

  // Forward and backward: waits for the weights, puts Gradient(rank, seed) into every place, sends READY of each
  // boundary. `seed` is the coming step's id by default.
  absl::Status Backward();
  absl::Status Backward(uint64_t seed, int as_rank);
  // Sets the hyperparameters and steps.
  absl::StatusOr<client::StepResult> Step(const client::StepOptions& options = {});
  // Backward and Step, `count` times.
  absl::Status Train(int count);

  absl::StatusOr<std::vector<float>> Read(const std::string& parameter, client::StateKind kind);
  // What the WEIGHT arena shows, once it shows the last step.
  absl::StatusOr<std::vector<float>> Weight(int parameter);

  // Leaves; both objects are gone after it.
  absl::Status Close();

 private:
  client::OpenOptions table_;
  std::unique_ptr<client::Connection> connection_;
  std::unique_ptr<client::Session> session_;
};

// Runs f(rank) on a thread for each rank; what each returned, by rank.
template <typename F>
auto OnRanks(int world, F f) -> std::vector<decltype(f(0))> {
  std::vector<decltype(f(0))> results;
  for (int rank = 0; rank < world; ++rank) results.emplace_back(absl::UnknownError("did not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&results, &f, rank] { results[static_cast<size_t>(rank)] = f(rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// All ranks of a job; aborts when one does not start.
std::vector<std::unique_ptr<Trainer>> StartAll(const std::string& endpoint, const JobOptions& job);
// The first error, else OK.
absl::Status TrainAll(std::vector<std::unique_ptr<Trainer>>& ranks, int steps);

}  // namespace dmuon::testing

#endif  // DMUON_TESTS_SUPPORT_TRAINER_H_
