// Between the messages of dmuon.v1 and the domain's types. Towards the domain everything is checked that the domain's
// types cannot hold: enums (zero is refused), ranges of integers, lengths. INVALID_ARGUMENT names the field, and the
// parameter where there is one, the expected and the given. What a valid value means is the domain's to judge.
#ifndef DMUON_SERVER_RPC_CONVERT_H_
#define DMUON_SERVER_RPC_CONVERT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuon/v1/admin.pb.h"
#include "dmuon/v1/trainer.pb.h"
#include "dmuon/v1/types.pb.h"
#include "server/session/types.h"

namespace dmuon::server::rpc {

absl::StatusOr<int> Rank(uint32_t rank);
absl::StatusOr<StateKind> FromProto(v1::StateKind kind);
absl::StatusOr<OpenSpec> FromProto(const v1::OpenSessionRequest& request);
absl::StatusOr<OptimizerSpec> FromProto(const v1::ConfigureGroupsRequest& request);
absl::StatusOr<Registration> FromProto(const v1::RegisterBuffersRequest& request);

v1::OpenSessionResponse ToProto(const Opened& opened, const ParameterTable& table);
v1::ConfigureGroupsResponse ToProto(const Configured& configured);
v1::RegisterBuffersResponse ToProto(const Registered& registered);
v1::StepRecord ToProto(const StepReport& report);
v1::SessionSummary Summary(const SessionDescription& session);
v1::DescribeSessionResponse ToProto(const SessionDescription& session);

}  // namespace dmuon::server::rpc

#endif  // DMUON_SERVER_RPC_CONVERT_H_
