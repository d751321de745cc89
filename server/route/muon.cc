// U = G + mu (mu M + G);  O = NS(U);  M = mu M + G;  W = W (1 - eta lambda) - eta s O.

#include <algorithm>
#include <cmath>
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

// One block of the parameter: a range of rows, contiguous in memory.
struct PlannedBlock {
  int64_t begin = 0;  // first element
  int64_t count = 0;
  double scale = 1;  // s
  const kernels::NewtonSchulz* newton_schulz = nullptr;
};

class Muon final : public Update {
 public:
  Muon(kernels::Backend& backend, int64_t numel, bool nesterov, ParameterState& state)
      : backend_(backend), numel_(numel), nesterov_(nesterov), state_(state) {}

  absl::Status Plan(const Parameter& parameter, const OptimizerSpec& spec) {
    const int64_t cols = AsMatrix(parameter).cols;
    for (const Block& block : parameter.blocks) {
      const int64_t rows = block.row_end - block.row_begin;
      auto& plan = plans_[rows];
      if (plan == nullptr) {
        ASSIGN_OR_RETURN(plan, kernels::PlanNewtonSchulz(backend_, spec.newton_schulz, rows, cols));
        newton_schulz_bytes_ = std::max(newton_schulz_bytes_, plan->workspace_bytes());
      }
      blocks_.push_back(
          {block.row_begin * cols, rows * cols, Scale(spec.adjust_lr, rows, cols), plan.get()});
    }
    return absl::OkStatus();
  }

  // U, then O in its place; behind it Newton-Schulz's own.
  size_t workspace_bytes() const override { return update_bytes() + newton_schulz_bytes_; }

  absl::Status Prepare(std::byte* workspace) override {
    for (const auto& [rows, plan] : plans_)
      RETURN_IF_ERROR(plan->Prepare(workspace + update_bytes()));
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
    for (const PlannedBlock& b : blocks_) {
      b.newton_schulz->Run(stream, update + b.begin, update + b.begin, workspace + update_bytes());
    }
  }

  void Commit(kernels::Stream stream, const UpdateInputs& in, const std::byte* workspace) override {
    const float* orthogonal = reinterpret_cast<const float*>(workspace);
    for (const PlannedBlock& b : blocks_) {
      backend_.MuonCommit(stream, {.momentum = state_.momentum + b.begin,
                                   .gradient = state_.gradient + b.begin,
                                   .weight = state_.weight + b.begin,
                                   .orthogonal = orthogonal + b.begin,
                                   .count = b.count,
                                   .mu = static_cast<float>(in.hyper.momentum),
                                   .clip = static_cast<float>(in.clip_coefficient),
                                   .decay = static_cast<float>(in.hyper.lr * in.hyper.weight_decay),
                                   .scale = static_cast<float>(in.hyper.lr * b.scale)});
    }
  }

  int newton_schulz_calls() const override { return static_cast<int>(blocks_.size()); }
  std::string kernel() const override { return blocks_[0].newton_schulz->kernel(); }
  std::string form() const override {
    return blocks_[0].newton_schulz->form() == kernels::NsForm::kGram ? "gram" : "direct";
  }

 private:
  size_t update_bytes() const { return AlignUp(sizeof(float) * numel_, 256); }

  kernels::Backend& backend_;
  const int64_t numel_;
  const bool nesterov_;
  ParameterState& state_;
  std::map<int64_t, std::unique_ptr<kernels::NewtonSchulz>> plans_;  // by rows
  std::vector<PlannedBlock> blocks_;
  size_t newton_schulz_bytes_ = 0;
};

}  // namespace

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

absl::StatusOr<std::unique_ptr<Update>> MakeMuon(kernels::Backend& backend,
                                                 const Parameter& parameter,
                                                 const OptimizerSpec& spec, ParameterState& state) {
  auto muon = std::make_unique<Muon>(backend, parameter.numel(), spec.nesterov, state);
  RETURN_IF_ERROR(
      Annotate(muon->Plan(parameter, spec), absl::StrFormat("parameter '%s'", parameter.name)));
  return muon;
}

}  // namespace dmuon::server
