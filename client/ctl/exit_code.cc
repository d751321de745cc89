#include "client/ctl/exit_code.h"

namespace dmuon::ctl {

ExitCode ToExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk: return kOk;
    case absl::StatusCode::kUnavailable: return kUnreachable;
    case absl::StatusCode::kInvalidArgument: return kInvalidInput;
    case absl::StatusCode::kFailedPrecondition: return kPrecondition;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated: return kDenied;
    case absl::StatusCode::kNotFound: return kNotFound;
    case absl::StatusCode::kDeadlineExceeded: return kTimedOut;
    case absl::StatusCode::kCancelled: return kInterrupted;
    default: return kFailed;
  }
}

}  // namespace dmuon::ctl
