#include "server/session/layout.h"

#include <algorithm>

#include "base/checked_math.h"
#include "proto/wire/control_page.h"

namespace dmuon::server {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr int kSharedWindows = 2;

std::vector<int> Windows(const ParameterTable& table, bool z3) {
  std::vector<int> window(table.boundaries.size());
  // Numbered without gaps, however few boundaries take turns.
  const auto in_turn = std::count_if(table.boundaries.begin(), table.boundaries.end(),
                                     [](const Boundary& b) { return !b.exclusive_window; });
  int shared = 0, own = std::min(kSharedWindows, static_cast<int>(in_turn));
  for (size_t b = 0; b < window.size(); ++b) {
    if (!z3) {
      window[b] = static_cast<int>(b);
    } else {
      window[b] = table.boundaries[b].exclusive_window ? own++ : shared++ % kSharedWindows;
    }
  }
  return window;
}

struct Sizes {
  uint64_t grad = 0;
  uint64_t weight = 0;
};

}  // namespace

Layout MakeLayout(const ParameterTable& table, const OptimizerSpec& spec, bool z3) {
  Layout layout;
  layout.window = Windows(table, z3);
  layout.grad_offset.resize(table.parameters.size());
  layout.weight_offset.resize(table.parameters.size());

  // Offsets within the boundary first; a window is as large as its largest boundary.
  std::vector<Sizes> boundary(table.boundaries.size());
  for (size_t i = 0; i < table.parameters.size(); ++i) {
    const Parameter& p = table.parameters[i];
    Sizes& at = boundary[p.boundary.index()];
    layout.grad_offset[i] = at.grad;
    layout.weight_offset[i] = at.weight;
    at.grad += AlignUp(p.numel() * ByteSize(spec.parameters[i].grad_dtype), kAlignment);
    at.weight += AlignUp(p.numel() * ByteSize(spec.parameters[i].param_dtype), kAlignment);
  }
  std::vector<Sizes> window(*std::max_element(layout.window.begin(), layout.window.end()) + 1);
  for (size_t b = 0; b < boundary.size(); ++b) {
    Sizes& w = window[layout.window[b]];
    w.grad = std::max(w.grad, boundary[b].grad);
    w.weight = std::max(w.weight, boundary[b].weight);
  }
  std::vector<Sizes> base(window.size());
  Sizes total;
  for (size_t w = 0; w < window.size(); ++w) {
    base[w] = total;
    total.grad += window[w].grad;
    total.weight += window[w].weight;
  }
  for (size_t i = 0; i < table.parameters.size(); ++i) {
    const Sizes& at = base[layout.window[table.parameters[i].boundary.index()]];
    layout.grad_offset[i] += at.grad;
    layout.weight_offset[i] += at.weight;
  }
  layout.grad_bytes = AlignUp(total.grad, 4096);
  layout.weight_bytes = AlignUp(total.weight, 4096);
  layout.control_bytes = wire::PageLayout::For(static_cast<uint32_t>(table.boundaries.size()),
                                               static_cast<uint32_t>(table.parameters.size()),
                                               static_cast<uint32_t>(spec.groups.size()))
                             .bytes;
  return layout;
}

}  // namespace dmuon::server
