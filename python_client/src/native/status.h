// From absl::Status to Python exceptions.
#ifndef DMUON_PYTHON_CLIENT_NATIVE_STATUS_H_
#define DMUON_PYTHON_CLIENT_NATIVE_STATUS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dmuon::python {

// Throws what dmuon.errors.from_status makes of it; an interrupt that a wait was ended by comes first.
// REQUIRES: the GIL.
void ThrowIfError(const absl::Status& status);

template <typename T>
T ValueOrThrow(absl::StatusOr<T> result) {
  ThrowIfError(result.status());
  return *std::move(result);
}

}  // namespace dmuon::python

#endif  // DMUON_PYTHON_CLIENT_NATIVE_STATUS_H_
