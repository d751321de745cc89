#include "server/rpc/status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace dmuon::server::rpc {
namespace {

constexpr size_t kMaxText = 4096;

// Both lists are google.rpc.Code.
static_assert(static_cast<int>(absl::StatusCode::kOk) == static_cast<int>(grpc::StatusCode::OK));
static_assert(static_cast<int>(absl::StatusCode::kInvalidArgument) ==
              static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
static_assert(static_cast<int>(absl::StatusCode::kResourceExhausted) ==
              static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED));
static_assert(static_cast<int>(absl::StatusCode::kAborted) ==
              static_cast<int>(grpc::StatusCode::ABORTED));
static_assert(static_cast<int>(absl::StatusCode::kUnauthenticated) ==
              static_cast<int>(grpc::StatusCode::UNAUTHENTICATED));

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string text(status.message());
  if (text.size() > kMaxText)
    text = absl::StrCat(absl::string_view(text).substr(0, kMaxText), " ...");
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), text);
}

grpc::Status NotBuilt(absl::string_view rpc) {
  return grpc::Status(grpc::StatusCode::UNIMPLEMENTED, absl::StrCat(rpc, " is not built yet"));
}

}  // namespace dmuon::server::rpc
