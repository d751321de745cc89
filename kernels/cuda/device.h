// The devices that this process sees, by the names that other processes know them by: ordinals are each process's own.
#ifndef DMUON_KERNELS_CUDA_DEVICE_H_
#define DMUON_KERNELS_CUDA_DEVICE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuon::cuda {

// "GPU-..." or "MIG-...".
absl::StatusOr<std::string> NameOf(int ordinal);

// The ordinal here of the device with that name. INVALID_ARGUMENT: no name of a device; NOT_FOUND: not one that this
// process sees, and which those are.
absl::StatusOr<int> OrdinalOf(absl::string_view name);

// Whether a second process can work on this device, and share its memory with this one. FAILED_PRECONDITION says what is in
// the way.
absl::Status CheckShareable(int ordinal);

// Makes this process's context there. UNAVAILABLE: the device is in a mode that keeps this process out, or what the driver
// says.
absl::Status Open(int ordinal, absl::string_view product);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_DEVICE_H_
