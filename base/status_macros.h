// Early returns for absl::Status and absl::StatusOr, and the one place that adds context to them.
#ifndef DMUON_BASE_STATUS_MACROS_H_
#define DMUON_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace dmuon {

// "registering 'layers.3.q_proj': " + the message of `status`; the code stays. OK stays OK.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(context, ": ", status.message()));
}

}  // namespace dmuon

#define DMUON_CONCAT_INNER_(a, b) a##b
#define DMUON_CONCAT_(a, b) DMUON_CONCAT_INNER_(a, b)

#define RETURN_IF_ERROR(expr)                      \
  do {                                             \
    absl::Status status_macro_ = (expr);           \
    if (!status_macro_.ok()) return status_macro_; \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expr) \
  ASSIGN_OR_RETURN_IMPL_(DMUON_CONCAT_(statusor_, __LINE__), lhs, expr)
#define ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr)        \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = *std::move(statusor)

#endif  // DMUON_BASE_STATUS_MACROS_H_
