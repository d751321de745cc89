#include "server/collective/nccl_module.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/collective/nccl_communicator.h"
#include "server/collective/nccl_status.h"

namespace dmuon::server {
namespace {

class NcclCommunicators final : public DeviceCommunicators {
 public:
  absl::StatusOr<std::string> NewId() override {
    ncclUniqueId id;
    RETURN_IF_ERROR(NcclStatus(ncclGetUniqueId(&id), "making an id"));
    return std::string(id.internal, sizeof(id.internal));
  }
  absl::StatusOr<std::unique_ptr<DeviceCommunicator>> Create(
      const DeviceCommunicatorOptions& options) override {
    return NcclCommunicator::Create(options);
  }
  std::string description() const override {
    int version = 0;
    (void)ncclGetVersion(&version);
    return absl::StrCat("NCCL ", version / 10000, ".", version / 100 % 100, ".", version % 100);
  }
};

}  // namespace
}  // namespace dmuon::server

extern "C" __attribute__((visibility("default"))) dmuon::server::DeviceCommunicators*
dmuon_nccl_open(uint32_t abi) {
  static dmuon::server::NcclCommunicators communicators;
  return abi == dmuon::server::kNcclModuleAbi ? &communicators : nullptr;
}
