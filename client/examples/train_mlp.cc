// Trains a small network with dmuon and without Python: Muon for the matrices, AdamW for the biases, weights always
// resident (Z2). Only client/dmuon/client.h is used.
//
//   train_mlp --world 2                    # starts both ranks
//   train_mlp --world 2 --rank 0 & train_mlp --world 2 --rank 1
//
// Prints the loss of rank 0 as it falls. Ends with 0 when it fell to less than half, with 1 on any error.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "client/dmuon/client.h"
#include "client/examples/mlp.h"

extern char** environ;

namespace {

using dmuon::client::Connection;
using dmuon::client::Session;
using dmuon::examples::Batch;
using dmuon::examples::InitialWeight;
using dmuon::examples::Layer;
using dmuon::examples::Mlp;
using dmuon::examples::TeacherBatch;

constexpr int kSizes[] = {16, 64, 64, 8};  // inputs, hidden, hidden, outputs
constexpr size_t kLayers = 3;
constexpr int kMuonGroup = 0, kAdamwGroup = 1;

struct Arguments {
  std::string endpoint = dmuon::client::DefaultEndpoint().value_or("/run/dmuon");
  std::string job = "train-mlp";
  int world = 1;
  int rank = -1;  // -1: start all ranks
  int steps = 200;
  int batch = 64;  // over all ranks
};

// Parameters 2 i and 2 i + 1 are weight and bias of layer i, which is also boundary i.
int WeightOf(size_t layer) { return static_cast<int>(2 * layer); }
int BiasOf(size_t layer) { return static_cast<int>(2 * layer + 1); }

dmuon::client::OpenOptions Table(const Arguments& arguments) {
  dmuon::client::OpenOptions options;
  options.job = arguments.job;
  options.rank = arguments.rank;
  options.mesh.shard = arguments.world;
  for (size_t i = 0; i < kLayers; ++i) {
    const std::string name = "layers." + std::to_string(i);
    const int boundary = static_cast<int>(i);
    options.boundaries.push_back({name});
    options.parameters.push_back(
        {name + ".weight", {kSizes[i + 1], kSizes[i]}, dmuon::client::Route::kMuon, boundary});
    options.parameters.push_back(
        {name + ".bias", {kSizes[i + 1]}, dmuon::client::Route::kAdamw, boundary});
  }
  return options;
}

dmuon::client::OptimizerOptions Optimizer() {
  dmuon::client::OptimizerOptions options;
  options.groups = {{"matrices", dmuon::client::Route::kMuon},
                    {"vectors", dmuon::client::Route::kAdamw}};
  for (size_t i = 0; i < kLayers; ++i) {
    options.parameters.push_back({.group = kMuonGroup});
    options.parameters.push_back({.group = kAdamwGroup});
  }
  return options;
}

// The arenas' memory as the network's layers.
std::vector<Layer> Layers(std::byte* (Session::*view)(int) const, const Session& session) {
  std::vector<Layer> layers;
  for (size_t i = 0; i < kLayers; ++i) {
    layers.push_back({kSizes[i], kSizes[i + 1],
                      reinterpret_cast<float*>((session.*view)(WeightOf(i))),
                      reinterpret_cast<float*>((session.*view)(BiasOf(i)))});
  }
  return layers;
}

// Each parameter's first values come from the rank that owns it; biases begin at zero by themselves.
absl::Status WriteInitialWeights(Session& session, int rank) {
  for (size_t i = 0; i < kLayers; ++i) {
    if (session.placement().parameters[static_cast<size_t>(WeightOf(i))].owner != rank) continue;
    const std::vector<float> values =
        InitialWeight(kSizes[i + 1], kSizes[i], static_cast<unsigned>(i));
    const absl::Status written = session.WriteState(
        "layers." + std::to_string(i) + ".weight", dmuon::client::StateKind::kWeight,
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                            values.size() * sizeof(float)));
    if (!written.ok()) return written;
  }
  return absl::OkStatus();
}

// One forward and backward pass of this rank's share, and the step.
absl::StatusOr<double> TrainStep(Session& session, Mlp& network,
                                 const std::vector<Layer>& gradients, const Batch& batch) {
  absl::Status status = session.WaitAllWeights();
  for (size_t i = 0; i < kLayers && status.ok(); ++i)
    status = session.WaitGradWritable(static_cast<int>(i));
  if (!status.ok()) return status;
  const double loss = network.LossAndGradient(batch, gradients, [&](size_t layer) {
    session.SetPresent(WeightOf(layer));
    session.SetPresent(BiasOf(layer));
    // Reduced while the layers before it are still computing.
    if (status.ok()) status = session.Ready(static_cast<int>(layer));
  });
  if (!status.ok()) return status;
  session.EndBackward();
  const auto result = session.Step({});
  if (!result.ok()) return result.status();
  return loss;
}

absl::Status Train(const Arguments& arguments) {
  auto connection = Connection::Open(arguments.endpoint);
  if (!connection.ok()) return connection.status();
  auto opened = (*connection)->OpenSession(Table(arguments));
  if (!opened.ok()) return opened.status();
  Session& session = **opened;
  absl::Status status = session.Configure(Optimizer());
  if (status.ok()) status = WriteInitialWeights(session, arguments.rank);
  if (status.ok()) status = session.Start();
  if (!status.ok()) return status;

  Mlp network(Layers(&Session::weight, session));
  const std::vector<Layer> gradients = Layers(&Session::grad, session);
  const Batch held_out = TeacherBatch(256, kSizes[0], kSizes[kLayers], 1);
  double first = 0, last = 0;
  for (int step = 0; step <= arguments.steps; ++step) {
    if (step % 20 == 0) {
      status = session.WaitAllWeights();
      if (!status.ok()) return status;
      last = network.Loss(held_out);
      if (step == 0) first = last;
      if (arguments.rank == 0) printf("step %4d  loss %.5f\n", step, last);
      fflush(stdout);
    }
    if (step == arguments.steps) break;
    session.SetHyper(kMuonGroup, {.lr = 0.02, .momentum = 0.95});
    session.SetHyper(kAdamwGroup, {.lr = 3e-3});
    const auto seed = static_cast<unsigned>(1000 + step * arguments.world + arguments.rank);
    const auto loss = TrainStep(
        session, network, gradients,
        TeacherBatch(arguments.batch / arguments.world, kSizes[0], kSizes[kLayers], seed));
    if (!loss.ok()) return loss.status();
  }
  status = session.Close();
  if (status.ok() && !(last < first / 2)) {
    return absl::InternalError("the loss went from " + std::to_string(first) + " to " +
                               std::to_string(last) + ", expected less than half");
  }
  return status;
}

// Starts this program once for each rank; 0 when all end with 0.
int SpawnRanks(const Arguments& arguments, char** argv, int argc) {
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < arguments.world; ++rank) {
    std::string flag = "--rank", number = std::to_string(rank);
    std::vector<char*> args(argv, argv + argc);
    args.insert(args.end(), {flag.data(), number.data(), nullptr});
    pid_t pid;
    if (posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, args.data(), environ) != 0) return 1;
    ranks.push_back(pid);
  }
  int result = 0;
  for (pid_t pid : ranks) {
    int status = 0;
    waitpid(pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) result = 1;
  }
  return result;
}

bool Parse(int argc, char** argv, Arguments& arguments) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const char* value = argv[i + 1];
    if (flag == "--endpoint") {
      arguments.endpoint = value;
    } else if (flag == "--job") {
      arguments.job = value;
    } else if (flag == "--world") {
      arguments.world = atoi(value);
    } else if (flag == "--rank") {
      arguments.rank = atoi(value);
    } else if (flag == "--steps") {
      arguments.steps = atoi(value);
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && arguments.world >= 1 && arguments.rank < arguments.world &&
         arguments.steps >= 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!Parse(argc, argv, arguments)) {
    fprintf(stderr, "usage: %s [--endpoint DIR] [--job NAME] [--world N] [--rank R] [--steps S]\n",
            argv[0]);
    return 64;
  }
  if (arguments.rank < 0) return SpawnRanks(arguments, argv, argc);
  const absl::Status status = Train(arguments);
  if (!status.ok()) {
    fprintf(stderr, "train_mlp: rank %d: %s\n", arguments.rank,
            std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
