// The grid of ranks and its named axes.
#ifndef DMUON_SERVER_PLACEMENT_MESH_H_
#define DMUON_SERVER_PLACEMENT_MESH_H_

#include "absl/status/status.h"

namespace dmuon::server {

// rank = (replicate * shard_size + shard) * tp_size + tp.
struct Mesh {
  int replicate = 1;
  int shard = 1;
  int tp = 1;

  int world_size() const { return replicate * shard * tp; }
  // Ranks over which gradients are averaged.
  int data_parallel_size() const { return replicate * shard; }

  friend bool operator==(const Mesh&, const Mesh&) = default;
};

// INVALID_ARGUMENT for an axis < 1 or a world size over 4096; UNIMPLEMENTED for tp > 1.
absl::Status Check(const Mesh& mesh);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_PLACEMENT_MESH_H_
