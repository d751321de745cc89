// The devices that this process sees, by the names that other processes know them by: ordinals are each process's own.
#ifndef DMUON_KERNELS_CUDA_DEVICE_H_
#define DMUON_KERNELS_CUDA_DEVICE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuon::cuda {

// "GPU-" or "MIG-", then the 16 bytes of the id as the driver's tools print them. A MIG instance is known by its name.
std::string DeviceName(const unsigned char* uuid, absl::string_view product);

absl::StatusOr<std::string> NameOf(int ordinal);

// The ordinal here of the device with that name. INVALID_ARGUMENT: no name of a device; NOT_FOUND: not one that this
// process sees, and which those are.
absl::StatusOr<int> OrdinalOf(absl::string_view name);

// Whether a second process can work on this device, and share its memory with this one. FAILED_PRECONDITION says what is in
// the way.
absl::Status CheckShareable(int ordinal);

// Two Linux kernels in one machine: Windows' driver has no handles for memory. `release`: /proc/sys/kernel/osrelease.
bool IsWsl(absl::string_view release);

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_DEVICE_H_
