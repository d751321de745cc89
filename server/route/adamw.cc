// PyTorch's AdamW, decoupled decay, on a parameter that the daemon owns whole.

#include "server/route/route.h"

namespace dmuon::server {
namespace {

class Adamw final : public Update {
 public:
  Adamw(kernels::Backend& backend, int64_t numel, ParameterState& state)
      : backend_(backend), numel_(numel), state_(state) {}

  // Elementwise, and in one pass over memory: all of it is commit.
  void Compute(kernels::Stream, const UpdateInputs&, const UpdatePlace&) override {}

  void Commit(kernels::Stream stream, const UpdateInputs& in, const UpdatePlace&) override {
    ++state_.adamw_steps;
    backend_.Adamw(stream, {.weight = state_.weight,
                            .exp_avg = state_.exp_avg,
                            .exp_avg_sq = state_.exp_avg_sq,
                            .gradient = state_.gradient,
                            .count = numel_,
                            .lr = in.hyper.lr,
                            .beta1 = in.hyper.beta1,
                            .beta2 = in.hyper.beta2,
                            .eps = in.hyper.eps,
                            .weight_decay = in.hyper.weight_decay,
                            .step = state_.adamw_steps});
  }

 private:
  kernels::Backend& backend_;
  const int64_t numel_;
  ParameterState& state_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Update>> MakeAdamw(NewtonSchulzPlans& plans,
                                                  const Parameter& parameter,
                                                  ParameterState& state) {
  return std::make_unique<Adamw>(plans.backend(), parameter.numel(), state);
}

}  // namespace dmuon::server
