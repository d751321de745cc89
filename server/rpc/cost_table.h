// The cost table between its message, which the coordinator and the calibration file carry, and the kernels' type.
#ifndef DMUON_SERVER_RPC_COST_TABLE_H_
#define DMUON_SERVER_RPC_COST_TABLE_H_

#include "absl/status/statusor.h"
#include "dmuon/v1/types.pb.h"
#include "kernels/newton_schulz/cost_table.h"

namespace dmuon::server::rpc {

// INVALID_ARGUMENT, with the field, the expected and the given, for anything that kernels::Check refuses.
absl::StatusOr<kernels::CostTable> FromProto(const v1::CostTable& message);
v1::CostTable ToProto(const kernels::CostTable& table);

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_COST_TABLE_H_
