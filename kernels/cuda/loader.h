// Opens the CUDA backend at run time, so that one binary starts on machines with and without CUDA.
#ifndef DMUON_KERNELS_CUDA_LOADER_H_
#define DMUON_KERNELS_CUDA_LOADER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/ops/backend.h"

namespace dmuon::cuda {

// Where the library may lie: beside the executable, in ../lib of it, and beside the library that holds this function, which
// is a Python extension when the executable is Python.
std::vector<std::string> ModulePlaces();

// The entry of a module of ours from the first of `places` that has the file. The library stays loaded.
// UNAVAILABLE, and why: no such file, or a library that it needs is missing. FAILED_PRECONDITION: it has no such entry.
absl::StatusOr<void*> OpenModule(absl::string_view file, const char* entry,
                                 absl::Span<const std::string> places);

// The backend on one device, from the first of `places` that has the library. The library stays loaded.
// UNAVAILABLE, and why: no such file, a CUDA library that it needs is missing, no driver, no device.
// FAILED_PRECONDITION: a library of another build.
absl::StatusOr<std::unique_ptr<kernels::Backend>> LoadBackend(int device);
absl::StatusOr<std::unique_ptr<kernels::Backend>> LoadBackend(int device,
                                                              absl::Span<const std::string> places);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_LOADER_H_
