// The small job of fixture.h in float64: what its weights and momenta should be after any number of steps.
#ifndef DMUON_TESTS_SERVER_SESSION_REFERENCE_H_
#define DMUON_TESTS_SERVER_SESSION_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/types/span.h"
#include "proto/wire/control_page.h"
#include "tests/server/session/fixture.h"

namespace dmuon::server::testing {

class SmallReference {
 public:
  struct Outcome {
    bool applied = true;
    double clip_coefficient = 1;
  };

  SmallReference() {
    const std::vector<Parameter> parameters = SmallTable().parameters;
    for (size_t p = 0; p < parameters.size(); ++p) {
      const std::vector<float> w = Gaussian(parameters[p].numel(), 100 + p);
      Matrix64 weight(w.begin(), w.end());
      if (parameters[p].route == Route::kMuon) {
        muon_.push_back(BlocksOf(parameters[p].shape, weight));
      } else {
        muon_.emplace_back();
        adamw_.weight = std::move(weight);
      }
    }
  }

  // `mean`: of the gradients over the ranks, by parameter; empty where no rank had one. `groups`: muon's and adamw's.
  Outcome Step(std::vector<Matrix64> mean, absl::Span<const wire::GroupHyper> groups,
               double max_norm = 0) {
    double square = 0;
    bool finite = true;
    for (size_t p = 0; p < mean.size(); ++p) {
      for (double x : mean[p]) {
        finite = finite && std::isfinite(x);
        if (!muon_[p].empty()) square += x * x;
      }
    }
    if (!finite) return {false, 1};
    const double clip = max_norm > 0 ? std::min(1.0, max_norm / (std::sqrt(square) + 1e-6)) : 1;
    for (size_t p = 0; p < mean.size(); ++p) {
      if (mean[p].empty()) continue;
      if (muon_[p].empty()) {
        const wire::GroupHyper& h = groups[1];
        adamw_.Step(mean[p], h.lr, h.beta1, h.beta2, h.eps, h.weight_decay);
        continue;
      }
      for (double& x : mean[p]) x *= clip;
      auto at = mean[p].begin();
      for (Muon64& block : muon_[p]) {
        const Matrix64 g(at, at + block.rows * block.cols);
        block.Step(g, groups[0].lr, groups[0].momentum, groups[0].weight_decay);
        at += block.rows * block.cols;
      }
    }
    return {true, clip};
  }

  Matrix64 weight(size_t p) const {
    if (muon_[p].empty()) return adamw_.weight;
    Matrix64 all;
    for (const Muon64& b : muon_[p]) all.insert(all.end(), b.weight.begin(), b.weight.end());
    return all;
  }
  // Muon's momentum buffer, or AdamW's first moment.
  Matrix64 momentum(size_t p) const {
    if (muon_[p].empty()) return adamw_.m;
    Matrix64 all;
    for (const Muon64& b : muon_[p]) all.insert(all.end(), b.momentum.begin(), b.momentum.end());
    return all;
  }

 private:
  // One block, or one for each leading index of three dimensions.
  static std::vector<Muon64> BlocksOf(const std::vector<int64_t>& shape, const Matrix64& weight) {
    const int64_t rows = shape[shape.size() - 2], cols = shape.back();
    std::vector<Muon64> blocks;
    for (auto at = weight.begin(); at != weight.end(); at += rows * cols)
      blocks.push_back({rows, cols, Matrix64(at, at + rows * cols), {}});
    return blocks;
  }

  std::vector<std::vector<Muon64>> muon_;  // by parameter, by block; empty for the one on adamw
  Adamw64 adamw_;
};

}  // namespace dmuon::server::testing

#endif  // DMUON_TESTS_SERVER_SESSION_REFERENCE_H_
