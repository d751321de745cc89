// From the client's types to the messages and back.
#ifndef DMUON_CLIENT_CONVERT_H_
#define DMUON_CLIENT_CONVERT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dmuon/client.h"
#include "dmuon/v1/trainer.pb.h"

namespace dmuon::client {

// INVALID_ARGUMENT only for what the messages cannot hold (negative numbers); all else is the
// daemon's to judge.
absl::StatusOr<v1::OpenSessionRequest> ToProto(const OpenOptions& options);
absl::StatusOr<v1::ConfigureGroupsRequest> ToProto(const OptimizerOptions& options);

Placement FromProto(const v1::OpenSessionResponse& response);
StepProfile FromProto(const v1::StepRecord& record);

size_t ElementBytes(Dtype dtype);

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_CONVERT_H_
