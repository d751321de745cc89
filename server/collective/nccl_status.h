// NCCL's codes as absl::Status.
#ifndef DMUON_SERVER_COLLECTIVE_NCCL_STATUS_H_
#define DMUON_SERVER_COLLECTIVE_NCCL_STATUS_H_

#include <nccl.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dmuon::server {

// OK: done, or in progress. UNAVAILABLE: another rank or the network is gone. INVALID_ARGUMENT: refused as it was asked.
inline absl::Status NcclStatus(ncclResult_t result, absl::string_view doing) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const std::string message = absl::StrCat(doing, ": NCCL: ", ncclGetErrorString(result));
  switch (result) {
    case ncclRemoteError:
    case ncclSystemError: return absl::UnavailableError(message);
    case ncclInvalidArgument:
    case ncclInvalidUsage: return absl::InvalidArgumentError(message);
    default: return absl::InternalError(message);
  }
}

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_NCCL_STATUS_H_
