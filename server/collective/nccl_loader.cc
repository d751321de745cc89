#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/loader.h"
#include "server/collective/device_communicator.h"
#include "server/collective/nccl_module.h"

namespace dmuon::server {

absl::StatusOr<DeviceCommunicators*> LoadDeviceCommunicators() {
  ASSIGN_OR_RETURN(void* const entry,
                   cuda::OpenModule(kNcclModuleFile, kNcclModuleEntry, cuda::ModulePlaces()));
  DeviceCommunicators* communicators = reinterpret_cast<NcclModuleEntry>(entry)(kNcclModuleAbi);
  if (communicators == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        kNcclModuleFile, " is of another build: interface ", kNcclModuleAbi, " is not its own"));
  }
  return communicators;
}

}  // namespace dmuon::server
