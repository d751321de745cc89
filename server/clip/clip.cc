#include "server/clip/clip.h"

#include <algorithm>

namespace dmuon::server {

double ClipCoefficient(double total_norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (total_norm + 1e-6));
}

}  // namespace dmuon::server
