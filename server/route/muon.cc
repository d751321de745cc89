// U = G + mu (mu M + G);  O = NS(U);  M = mu M + G;  W = W (1 - eta lambda) - eta s O.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/checked_math.h"
#include "base/status_macros.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "server/route/route.h"

namespace dmuon::server {
namespace {

// Blocks of one shape run together.
struct Batch {
  std::unique_ptr<kernels::NewtonSchulz> newton_schulz;
  std::vector<int64_t> offsets;  // of their first elements
  int64_t rows = 0;
  double scale = 1;  // s
};

// Where everything lies in the workspace: first U, then O in its place; behind it Newton-Schulz's own; then what is measured,
// kind by kind.
struct Places {
  static constexpr size_t kSums = 3;  // for each block

  size_t newton_schulz = 0;
  size_t sums = 0;
  size_t bytes = 0;
  size_t planning_bytes = 0;  // elsewhere, of the largest plan
};

// By their rows: the places of a parameter's blocks in its list.
std::map<int64_t, std::vector<size_t>> BlocksByRows(const Parameter& parameter) {
  std::map<int64_t, std::vector<size_t>> by_rows;
  for (size_t i = 0; i < parameter.blocks.size(); ++i)
    by_rows[parameter.blocks[i].row_end - parameter.blocks[i].row_begin].push_back(i);
  return by_rows;
}

absl::StatusOr<Places> PlaceUpdate(const kernels::Backend& backend, const Parameter& parameter,
                                   const OptimizerSpec& spec) {
  constexpr size_t kAlign = 256;
  size_t newton_schulz_bytes = 0;
  Places places;
  for (const auto& [rows, blocks] : BlocksByRows(parameter)) {
    ASSIGN_OR_RETURN(
        const kernels::NewtonSchulzMemory memory,
        kernels::PlanMemory(backend, spec.newton_schulz, rows, AsMatrix(parameter).cols,
                            static_cast<int64_t>(blocks.size())));
    newton_schulz_bytes = std::max(newton_schulz_bytes, memory.workspace_bytes);
    places.planning_bytes = std::max(places.planning_bytes, memory.planning_bytes);
  }
  places.newton_schulz = AlignUp(sizeof(float) * static_cast<size_t>(parameter.numel()), kAlign);
  places.sums = places.newton_schulz + AlignUp(newton_schulz_bytes, kAlign);
  const size_t sums = backend.measures_blocks() ? Places::kSums * parameter.blocks.size() : 0;
  places.bytes = places.sums + AlignUp(sizeof(double) * sums, kAlign);
  return places;
}

// What a step measures of one block, in the backend's memory.
struct BlockSums {
  double* update;      // ||U||_F^2
  double* orthogonal;  // ||O||_F^2
  double* error;       // estimate of ||O O^T - I||_F^2 / m
};

class Muon final : public Update {
 public:
  Muon(kernels::Backend& backend, const Parameter& parameter, bool nesterov, ParameterState& state)
      : backend_(backend),
        numel_(parameter.numel()),
        cols_(AsMatrix(parameter).cols),
        nesterov_(nesterov),
        state_(state) {}

  absl::Status Plan(const Parameter& parameter, const OptimizerSpec& spec) {
    ASSIGN_OR_RETURN(places_, PlaceUpdate(backend_, parameter, spec));
    for (const auto& [rows, blocks] : BlocksByRows(parameter)) {
      Batch batch{nullptr, {}, rows, Scale(spec.adjust_lr, rows, cols_)};
      ASSIGN_OR_RETURN(batch.newton_schulz,
                       kernels::PlanNewtonSchulz(backend_, spec.newton_schulz, rows, cols_,
                                                 static_cast<int64_t>(blocks.size())));
      const bool gram = batch.newton_schulz->form() == kernels::NsForm::kGram;
      for (size_t i : blocks) {
        batch.offsets.push_back(parameter.blocks[i].row_begin * cols_);
        blocks_.push_back({static_cast<int>(i), parameter.blocks[i], gram ? "gram" : "direct",
                           batch.newton_schulz->kernel()});
      }
      batches_.push_back(std::move(batch));
    }
    if (backend_.measures_blocks()) measured_.resize(Places::kSums * blocks_.size());
    return absl::OkStatus();
  }

  absl::Status Prepare(std::byte* workspace) override {
    for (const Batch& batch : batches_)
      RETURN_IF_ERROR(batch.newton_schulz->Prepare(workspace + places_.newton_schulz));
    return absl::OkStatus();
  }

  void Compute(kernels::Stream stream, const UpdateInputs& in, std::byte* workspace) override {
    float* update = reinterpret_cast<float*>(workspace);
    backend_.Lookahead(stream, {.momentum = state_.momentum,
                                .gradient = state_.gradient,
                                .update = update,
                                .count = numel_,
                                .mu = static_cast<float>(in.hyper.momentum),
                                .clip = static_cast<float>(in.clip_coefficient),
                                .nesterov = nesterov_});
    size_t block = 0;
    for (const Batch& batch : batches_) {
      batch.newton_schulz->RunBatch(stream, {.in = update,
                                             .out = update,
                                             .offsets = batch.offsets,
                                             .workspace = workspace + places_.newton_schulz,
                                             .square_norms = SumsIn(workspace, block).update});
      block += batch.offsets.size();
    }
  }

  void Commit(kernels::Stream stream, const UpdateInputs& in, std::byte* workspace) override {
    const float* orthogonal = reinterpret_cast<const float*>(workspace);
    size_t block = 0;
    for (const Batch& batch : batches_) {
      for (const int64_t begin : batch.offsets) {
        const BlockSums sums = SumsIn(workspace, block++);
        backend_.MuonCommit(stream,
                            {.momentum = state_.momentum + begin,
                             .gradient = state_.gradient + begin,
                             .weight = state_.weight + begin,
                             .orthogonal = orthogonal + begin,
                             .count = batch.rows * cols_,
                             .mu = static_cast<float>(in.hyper.momentum),
                             .clip = static_cast<float>(in.clip_coefficient),
                             .decay = static_cast<float>(in.hyper.lr * in.hyper.weight_decay),
                             .scale = static_cast<float>(in.hyper.lr * batch.scale),
                             .square_sum = sums.orthogonal});
        if (measured_.empty()) continue;
        backend_.Orthogonality(stream, {.orthogonal = orthogonal + begin,
                                        .rows = batch.rows,
                                        .cols = cols_,
                                        .square_error = sums.error});
      }
    }
    if (measured_.empty()) return;
    backend_.CopyToHost(stream, measured_.data(), SumsIn(workspace, 0).update,
                        sizeof(double) * measured_.size());
  }

  absl::Span<const BlockPlan> blocks() const override { return blocks_; }

  void Measures(absl::Span<BlockMeasures> out) const override {
    std::fill(out.begin(), out.end(), BlockMeasures{.ran = true});
    if (measured_.empty()) return;
    size_t block = 0;
    for (const Batch& batch : batches_) {
      const double count = static_cast<double>(batch.rows * cols_);
      for (size_t i = 0; i < batch.offsets.size(); ++i, ++block) {
        const double* sums = measured_.data();
        const size_t blocks = blocks_.size();
        out[block].measured = true;
        out[block].norm = static_cast<float>(std::sqrt(sums[block]));
        out[block].update_rms =
            static_cast<float>(batch.scale * std::sqrt(sums[blocks + block] / count));
        out[block].orthogonality_error = static_cast<float>(std::sqrt(sums[2 * blocks + block]));
      }
    }
  }

 private:
  // Null where the backend does not measure.
  BlockSums SumsIn(std::byte* workspace, size_t block) const {
    if (measured_.empty()) return {};
    auto* first = reinterpret_cast<double*>(workspace + places_.sums);
    return {first + block, first + blocks_.size() + block, first + 2 * blocks_.size() + block};
  }

  kernels::Backend& backend_;
  const int64_t numel_;
  const int64_t cols_;
  const bool nesterov_;
  ParameterState& state_;
  std::vector<Batch> batches_;
  std::vector<BlockPlan> blocks_;  // batch by batch
  std::vector<double> measured_;   // of the last commit; empty where the backend does not measure
  Places places_;
};

}  // namespace

double LargestGradient(double momentum) {
  // With mu = 1 nothing bounds M; a thousand steps of the largest gradient are allowed for.
  const double share = std::max(1 - std::abs(momentum), 1e-3);
  return share * static_cast<double>(std::numeric_limits<float>::max()) / 4;
}

double Scale(AdjustLr adjust, int64_t out, int64_t in) {
  const double ratio = static_cast<double>(out) / static_cast<double>(in);
  switch (adjust) {
    case AdjustLr::kMatchRmsAdamw: return 0.2 * std::sqrt(static_cast<double>(std::max(out, in)));
    case AdjustLr::kOriginal: return std::sqrt(std::max(1.0, ratio));
    case AdjustLr::kSpectral: return std::sqrt(ratio);
    case AdjustLr::kNone: return 1;
  }
  return 1;
}

absl::StatusOr<UpdateMemory> PlanMuon(const kernels::Backend& backend, const Parameter& parameter,
                                      const OptimizerSpec& spec) {
  const absl::StatusOr<Places> places = PlaceUpdate(backend, parameter, spec);
  if (!places.ok())
    return Annotate(places.status(), absl::StrFormat("parameter '%s'", parameter.name));
  return UpdateMemory{places->bytes, places->planning_bytes};
}

absl::StatusOr<std::unique_ptr<Update>> MakeMuon(kernels::Backend& backend,
                                                 const Parameter& parameter,
                                                 const OptimizerSpec& spec, ParameterState& state) {
  auto muon = std::make_unique<Muon>(backend, parameter, spec.nesterov, state);
  RETURN_IF_ERROR(
      Annotate(muon->Plan(parameter, spec), absl::StrFormat("parameter '%s'", parameter.name)));
  return muon;
}

}  // namespace dmuon::server
