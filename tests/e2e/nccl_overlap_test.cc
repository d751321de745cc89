// A trainer that does not wait for all weights of a step before it sends gradients of the next one: those of a boundary may
// come once its own weights are there. On GPUs that cannot read each other's memory. On the stand-ins for CUDA and NCCL.
#include <signal.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/environment.h"
#include "tests/support/trainer.h"

namespace dmuon::testing {
namespace {

constexpr int kLayers = 8, kSteps = 12;

client::OpenOptions Table(int rank) {
  return LayerTable({.job = "eager", .world = 2}, rank, kLayers);
}

absl::Status SendBoundary(Trainer& trainer, int b) {
  client::Session& session = trainer.session();
  const std::vector<float> gradient =
      Gradient(trainer.parameters()[static_cast<size_t>(b)], b, trainer.rank(), session.step() + 1);
  absl::Status status = session.WaitWeights(b);
  status.Update(session.WaitGradWritable(b));
  status.Update(PutGradient(session, b, gradient.data(), gradient.size() * sizeof(float)));
  session.SetPresent(b);
  status.Update(SendReady(session, b));
  return status;
}

absl::Status TrainEagerly(Trainer& trainer) {
  for (int step = 0; step < kSteps; ++step) {
    for (int b = 0; b < kLayers; ++b) {
      if (const absl::Status status = SendBoundary(trainer, b); !status.ok()) return status;
    }
    trainer.session().EndBackward();
    if (const auto result = trainer.Step(); !result.ok()) return result.status();
  }
  return absl::OkStatus();
}

// The momenta in the end, by parameter.
std::vector<std::vector<float>> Momenta(const std::string& peers) {
  const ScopedEnvironment scope({{"DMUON_FAKE_CUDA_DEVICES", "2"},
                                 {"DMUON_TEST_DEVICES", "2"},
                                 {"DMUON_FAKE_CUDA_PEERS", peers}});
  DaemonProcess daemon(Program("dmuond"), {"--backend=cuda"});
  client::OptimizerOptions optimizer = SmallOptimizer();
  optimizer.parameters.assign(kLayers, {.group = kMuonGroup});
  std::vector<std::vector<float>> momenta;
  auto ranks = OnRanks(
      2, [&](int rank) { return Trainer::Start(daemon.endpoint(), Table(rank), optimizer); });
  for (const auto& rank : ranks) {
    EXPECT_TRUE(rank.ok()) << rank.status();
    if (!rank.ok()) return momenta;
  }
  for (const absl::Status& status :
       OnRanks(2, [&](int rank) { return TrainEagerly(**ranks[static_cast<size_t>(rank)]); })) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (const client::Parameter& p : (*ranks[0])->parameters()) {
    const auto values = (*ranks[0])->Read(p.name, client::StateKind::kMomentum);
    EXPECT_TRUE(values.ok()) << values.status();
    momenta.push_back(values.value_or(std::vector<float>()));
  }
  EXPECT_EQ(daemon.Log().find("session_exchanges") != std::string::npos, peers == "none");
  for (auto& rank : ranks) EXPECT_TRUE((*rank)->Close().ok());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.Log();
  return momenta;
}

TEST(NcclOverlap, GradientsMayComeWhileTheStepBeforeIsStillPublished) {
  const auto exchanged = Momenta("none");
  ASSERT_EQ(exchanged.size(), static_cast<size_t>(kLayers));
  EXPECT_EQ(exchanged, Momenta("0-1"));
}

}  // namespace
}  // namespace dmuon::testing
