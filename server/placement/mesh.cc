#include "server/placement/mesh.h"

#include "absl/strings/str_format.h"

namespace dmuon::server {

absl::Status Check(const Mesh& mesh) {
  constexpr int kMaxWorldSize = 4096;
  const auto in_range = [](int axis) { return axis >= 1 && axis <= kMaxWorldSize; };
  if (!in_range(mesh.replicate) || !in_range(mesh.shard) || !in_range(mesh.tp) ||
      int64_t{mesh.replicate} * mesh.shard * mesh.tp > kMaxWorldSize) {
    return absl::InvalidArgumentError(
        absl::StrFormat("mesh: expected axes >= 1 and at most %d ranks, got %d x %d x %d",
                        kMaxWorldSize, mesh.replicate, mesh.shard, mesh.tp));
  }
  if (mesh.tp > 1) {
    return absl::UnimplementedError(
        absl::StrFormat("mesh axis tp = %d: tensor parallelism is not built yet", mesh.tp));
  }
  return absl::OkStatus();
}

}  // namespace dmuon::server
