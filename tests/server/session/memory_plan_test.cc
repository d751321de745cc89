// The memory table of docs/operations.md, from the functions that a session's plan is made of. Fails when the page says
// something else, and prints what it should say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cuda/run_plan.h"
#include "server/session/layout.h"
#include "server/step/worker.h"

namespace dmuon::server {
namespace {

using ::testing::HasSubstr;

struct Llama {
  const char* name;
  int layers;
  int64_t hidden, keys, ffn, vocabulary;
  bool tied;
};
// config.json of meta-llama/Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B.
constexpr Llama kModels[] = {{"1B", 16, 2048, 512, 8192, 128256, true},
                             {"8B", 32, 4096, 1024, 14336, 128256, false},
                             {"70B", 80, 8192, 1024, 28672, 128256, false}};

// Takes memory as the CUDA backend does, and can do nothing else: no GPU is needed to plan for one.
class PlannedGpu final : public kernels::Backend {
 public:
  absl::string_view name() const override { return "planned"; }
  std::string description() const override { return "planned"; }
  absl::StatusOr<void*> Allocate(size_t) override { return None(); }
  void Free(void*) override {}
  absl::StatusOr<kernels::Stream> CreateStream() override { return None(); }
  void DestroyStream(kernels::Stream) override {}
  absl::Status Synchronize(kernels::Stream) override { return None(); }
  void CopyToHost(kernels::Stream, void*, const void*, size_t) override {}
  void CopyFromHost(kernels::Stream, void*, const void*, size_t) override {}
  void Copy(kernels::Stream, void*, const void*, size_t) override {}
  void MeanOverRanks(kernels::Stream, const kernels::MeanArgs&) override {}
  void Lookahead(kernels::Stream, const kernels::LookaheadArgs&) override {}
  void MuonCommit(kernels::Stream, const kernels::MuonCommitArgs&) override {}
  void Orthogonality(kernels::Stream, const kernels::OrthogonalityArgs&) override {}
  void Adamw(kernels::Stream, const kernels::AdamwArgs&) override {}
  void Publish(kernels::Stream, const float*, Dtype, void*, int64_t) override {}

  bool shares_by_handle() const override { return true; }
  kernels::StreamMemory MemoryOfStream() const override { return cuda::MemoryOfStream(); }
  absl::StatusOr<kernels::NewtonSchulzMemory> MemoryOfNewtonSchulz(
      const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols,
      int64_t blocks) const override {
    return cuda::MemoryOfNewtonSchulz(options, {rows, cols, blocks});
  }

 private:
  static absl::Status None() { return absl::UnimplementedError("there is no device"); }
};

// What a trainer gives to dmuon: the matrices of the layers. Embeddings, head and norms stay with FSDP2's shards.
ParameterTable Matrices(const Llama& m) {
  ParameterTable table;
  for (int l = 0; l < m.layers; ++l) {
    const BoundaryId boundary(l);
    table.boundaries.push_back({absl::StrCat("layers.", l), false});
    const std::pair<const char*, std::pair<int64_t, int64_t>> shapes[] = {
        {"q", {m.hidden, m.hidden}}, {"k", {m.keys, m.hidden}},   {"v", {m.keys, m.hidden}},
        {"o", {m.hidden, m.hidden}}, {"gate", {m.ffn, m.hidden}}, {"up", {m.ffn, m.hidden}},
        {"down", {m.hidden, m.ffn}}};
    for (const auto& [name, shape] : shapes) {
      Parameter p;
      p.name = absl::StrCat("layers.", l, ".", name);
      p.shape = {shape.first, shape.second};
      p.route = Route::kMuon;
      p.boundary = boundary;
      table.parameters.push_back(std::move(p));
    }
  }
  EXPECT_TRUE(CheckAndResolve(table).ok());
  return table;
}

int64_t Elements(const ParameterTable& table) {
  int64_t n = 0;
  for (const Parameter& p : table.parameters) n += p.numel();
  return n;
}

int64_t OtherElements(const Llama& m) {
  return m.vocabulary * m.hidden * (m.tied ? 1 : 2) + m.hidden * (2 * m.layers + 1);
}

// The slot that holds most, without an allocation.
SlotMemory LargestSlot(kernels::Backend& backend, const ParameterTable& table, int ranks, bool z3) {
  StepContext context("plan");
  context.backends.assign(ranks, &backend);
  context.table = table;
  context.mesh.shard = ranks;
  context.z3 = z3;
  context.optimizer.groups = {{"muon", Route::kMuon}};
  context.optimizer.parameters.assign(table.parameters.size(), {Dtype::kBF16, Dtype::kBF16, 0});
  context.state.resize(table.parameters.size());
  context.layout = MakeLayout(table, context.optimizer, z3);
  context.plan = MakePlan(table, context.mesh, Place(table, context.mesh, Costs(table, {})));
  SlotMemory most;
  uint64_t largest = 0;
  for (int s = 0; s < ranks; ++s) {
    auto worker = Worker::Plan(context, SlotId(s));
    EXPECT_TRUE(worker.ok()) << worker.status();
    const SlotMemory m = (*worker)->memory();
    const uint64_t bytes = m.device_bytes();
    EXPECT_LE(m.planning_bytes, bytes);
    if (bytes <= largest) continue;
    largest = bytes;
    most = m;
  }
  return most;
}

double GiB(double bytes) { return bytes / (1024.0 * 1024 * 1024); }

// FSDP2 with bf16 compute keeps fp32 shards of weights, gradients and two moments, 16 bytes an element over the ranks;
// beside them the unsharded bf16 weights and gradients of all layers (Z2), or of the two that it has gathered (Z3).
double AdamwBytes(const Llama& m, double matrices, int ranks, bool z3) {
  const double all = matrices + static_cast<double>(OtherElements(m));
  const double unsharded = z3 ? 2 * matrices / m.layers : all;
  return 16 * all / ranks + 4 * unsharded;
}

std::string Table() {
  PlannedGpu gpu;
  std::string text =
      "| model | GPUs | mode | GRAD | WEIGHT | state | workspace | FSDP2 for the rest | in all | "
      "FSDP2 + "
      "AdamW |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
  for (const Llama& m : kModels) {
    const ParameterTable table = Matrices(m);
    const double matrices = static_cast<double>(Elements(table));
    const double others = static_cast<double>(OtherElements(m));
    for (int ranks : {8, 16, 32, 64}) {
      for (bool z3 : {false, true}) {
        const SlotMemory s = LargestSlot(gpu, table, ranks, z3);
        const double rest = 16 * others / ranks + (z3 ? 0 : 4 * others);
        const double all = static_cast<double>(s.device_bytes()) + rest;
        absl::StrAppendFormat(
            &text, "| %s | %d | %s | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f |\n", m.name,
            ranks, z3 ? "Z3" : "Z2", GiB(s.grad_bytes), GiB(s.weight_bytes), GiB(s.state_bytes),
            GiB(s.workspace_bytes), GiB(rest), GiB(all), GiB(AdamwBytes(m, matrices, ranks, z3)));
      }
    }
  }
  return text;
}

TEST(MemoryPlan, TheTableOfOperationsIsWhatThePlansSay) {
  const std::string table = Table();
  std::ifstream file(DMUON_SOURCE_DIR "/docs/operations.md");
  std::stringstream page;
  page << file.rdbuf();
  EXPECT_THAT(page.str(), HasSubstr(table));
}

TEST(MemoryPlan, ASlotsBytesAreTheFormulaOfThePage) {
  PlannedGpu gpu;
  const ParameterTable table = Matrices(kModels[0]);
  const double n = static_cast<double>(Elements(table));
  const SlotMemory one = LargestSlot(gpu, table, 1, false);
  EXPECT_NEAR(static_cast<double>(one.grad_bytes), 2 * n, 1e-3 * n);
  EXPECT_NEAR(static_cast<double>(one.weight_bytes), 2 * n, 1e-3 * n);
  EXPECT_NEAR(static_cast<double>(one.state_bytes), 12 * n, 1e-3 * n);
  const Llama& m = kModels[0];
  const double x = 2.0 * static_cast<double>(m.hidden * m.ffn);
  const double square = 2.0 * static_cast<double>(m.hidden * m.hidden);
  constexpr double kLane = 32 << 20, kStream = 1 << 19;
  EXPECT_NEAR(static_cast<double>(one.workspace_bytes),
              2 * x + 2 * x + 6 * square + 8 * kLane + kStream, 1e-3 * x);
  EXPECT_NEAR(static_cast<double>(one.planning_bytes), 3 * x + 2 * x + 4 * kLane + kStream,
              1e-3 * x);
  EXPECT_EQ(one.page_locked_bytes, 1u << 20);
  const SlotMemory windows = LargestSlot(gpu, table, 1, true);
  EXPECT_NEAR(static_cast<double>(windows.weight_bytes), 2 * 2 * n / kModels[0].layers, 1e-3 * n);
}

}  // namespace
}  // namespace dmuon::server
