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
  std::shared_ptr<kernels::NewtonSchulz> newton_schulz;
  std::vector<int64_t> offsets;  // of their first elements
  int64_t rows = 0;
  double scale = 1;  // s
};

// Where everything lies in the workspace: first U, then O in its place; behind it the norms of its blocks, then
// Newton-Schulz's own.
struct Places {
  size_t norms = 0;
  size_t newton_schulz = 0;
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
  places.norms = AlignUp(sizeof(float) * static_cast<size_t>(parameter.numel()), kAlign);
  places.newton_schulz =
      places.norms + AlignUp(sizeof(kernels::BlockNorm) * parameter.blocks.size(), kAlign);
  places.bytes = places.newton_schulz + AlignUp(newton_schulz_bytes, kAlign);
  return places;
}

constexpr size_t kSumsOfABlock = 3;
// What a step sums up of the blocks of a batch, one each; T is double, const where it is read.
template <typename T>
struct BatchSums {
  T* update;      // ||U||_F^2
  T* orthogonal;  // ||O||_F^2
  T* error;       // estimate of ||O O^T - I||_F^2 / m
};

class Muon final : public Update {
 public:
  Muon(NewtonSchulzPlans& plans, const Parameter& parameter, ParameterState& state)
      : backend_(plans.backend()),
        cols_(AsMatrix(parameter).cols),
        nesterov_(plans.spec().nesterov),
        state_(state) {}

  absl::Status Plan(NewtonSchulzPlans& plans, const Parameter& parameter) {
    ASSIGN_OR_RETURN(places_, PlaceUpdate(backend_, parameter, plans.spec()));
    for (const auto& [rows, blocks] : BlocksByRows(parameter)) {
      Batch batch{nullptr, {}, rows, Scale(plans.spec().adjust_lr, rows, cols_)};
      ASSIGN_OR_RETURN(batch.newton_schulz,
                       plans.For(rows, cols_, static_cast<int64_t>(blocks.size())));
      const bool gram = batch.newton_schulz->form() == kernels::NsForm::kGram;
      for (size_t i : blocks) {
        batch.offsets.push_back(parameter.blocks[i].row_begin * cols_);
        blocks_.push_back({static_cast<int>(i), parameter.blocks[i], gram ? "gram" : "direct",
                           batch.newton_schulz->kernel()});
      }
      batches_.push_back(std::move(batch));
    }
    return absl::OkStatus();
  }

  absl::Status Prepare(const UpdatePlace& place) override {
    size_t block = 0;
    for (const Batch& batch : batches_) {
      RETURN_IF_ERROR(batch.newton_schulz->Prepare(BatchIn(place, batch, block)));
      block += batch.offsets.size();
    }
    return absl::OkStatus();
  }

  void Compute(kernels::Stream stream, const UpdateInputs& in, const UpdatePlace& place) override {
    size_t block = 0;
    for (const Batch& batch : batches_) {
      const kernels::NewtonSchulzBatch newton_schulz = BatchIn(place, batch, block);
      backend_.Lookahead(stream, {.momentum = state_.momentum,
                                  .gradient = state_.gradient,
                                  .update = newton_schulz.out,
                                  .offsets = batch.offsets,
                                  .count = batch.rows * cols_,
                                  .mu = static_cast<float>(in.hyper.momentum),
                                  .clip = static_cast<float>(in.clip_coefficient),
                                  .nesterov = nesterov_,
                                  .norms = NormsIn(place) + block,
                                  .square_sums = SumsOf(place.sums, batch, block).update});
      batch.newton_schulz->RunBatch(stream, newton_schulz);
      block += batch.offsets.size();
    }
  }

  void Commit(kernels::Stream stream, const UpdateInputs& in, const UpdatePlace& place) override {
    const float* orthogonal = reinterpret_cast<const float*>(place.workspace);
    size_t block = 0;
    for (const Batch& batch : batches_) {
      const BatchSums<double> sums = SumsOf(place.sums, batch, block);
      backend_.MuonCommit(stream, {.momentum = state_.momentum,
                                   .gradient = state_.gradient,
                                   .weight = state_.weight,
                                   .orthogonal = orthogonal,
                                   .offsets = batch.offsets,
                                   .count = batch.rows * cols_,
                                   .mu = static_cast<float>(in.hyper.momentum),
                                   .clip = static_cast<float>(in.clip_coefficient),
                                   .decay = static_cast<float>(in.hyper.lr * in.hyper.weight_decay),
                                   .scale = static_cast<float>(in.hyper.lr * batch.scale),
                                   .square_sums = sums.orthogonal});
      backend_.Orthogonality(stream, {.orthogonal = orthogonal,
                                      .offsets = batch.offsets,
                                      .rows = batch.rows,
                                      .cols = cols_,
                                      .square_errors = sums.error});
      block += batch.offsets.size();
    }
  }

  absl::Span<const BlockPlan> blocks() const override { return blocks_; }

  void Measures(absl::Span<const double> sums, absl::Span<BlockMeasures> out) const override {
    size_t block = 0;
    for (const Batch& batch : batches_) {
      const double count = static_cast<double>(batch.rows * cols_);
      const BatchSums<const double> of = SumsOf(sums.data(), batch, block);
      for (size_t i = 0; i < batch.offsets.size(); ++i) {
        out[block + i] = {
            .ran = true,
            .norm = static_cast<float>(std::sqrt(of.update[i])),
            .update_rms = static_cast<float>(batch.scale * std::sqrt(of.orthogonal[i] / count)),
            .orthogonality_error = static_cast<float>(std::sqrt(of.error[i]))};
      }
      block += batch.offsets.size();
    }
  }

 private:
  kernels::BlockNorm* NormsIn(const UpdatePlace& place) const {
    return reinterpret_cast<kernels::BlockNorm*>(place.workspace + places_.norms);
  }
  // `block`: of the first of the batch. Parameters that are alike get the same addresses, so that a recording serves them all.
  kernels::NewtonSchulzBatch BatchIn(const UpdatePlace& place, const Batch& batch,
                                     size_t block) const {
    auto* const update = reinterpret_cast<float*>(place.workspace);
    return {.in = update,
            .out = update,
            .offsets = batch.offsets,
            .workspace = place.workspace + places_.newton_schulz,
            .norms = NormsIn(place) + block};
  }
  template <typename T>
  static BatchSums<T> SumsOf(T* sums, const Batch& batch, size_t block) {
    const size_t count = batch.offsets.size();
    T* const first = sums + kSumsOfABlock * block;
    return {first, first + count, first + 2 * count};
  }

  kernels::Backend& backend_;
  const int64_t cols_;
  const bool nesterov_;
  ParameterState& state_;
  std::vector<Batch> batches_;
  std::vector<BlockPlan> blocks_;  // batch by batch
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

size_t SumsOf(const Parameter& parameter) {
  return parameter.route == Route::kMuon ? kSumsOfABlock * parameter.blocks.size() : 0;
}

absl::StatusOr<UpdateMemory> PlanMuon(const kernels::Backend& backend, const Parameter& parameter,
                                      const OptimizerSpec& spec) {
  const absl::StatusOr<Places> places = PlaceUpdate(backend, parameter, spec);
  if (!places.ok())
    return Annotate(places.status(), absl::StrFormat("parameter '%s'", parameter.name));
  return UpdateMemory{places->bytes, places->planning_bytes};
}

absl::StatusOr<std::unique_ptr<Update>> MakeMuon(NewtonSchulzPlans& plans,
                                                 const Parameter& parameter,
                                                 ParameterState& state) {
  auto muon = std::make_unique<Muon>(plans, parameter, state);
  RETURN_IF_ERROR(
      Annotate(muon->Plan(plans, parameter), absl::StrFormat("parameter '%s'", parameter.name)));
  return muon;
}

}  // namespace dmuon::server
