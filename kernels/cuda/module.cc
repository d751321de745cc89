#include "kernels/cuda/module.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/backend.h"

extern "C" __attribute__((visibility("default"))) dmuon::kernels::Backend* dmuon_cuda_open(
    uint32_t abi, int device, int* code, char* why, size_t why_bytes) {
  absl::Status status;
  if (abi != dmuon::cuda::kModuleAbi) {
    status = absl::FailedPreconditionError(
        absl::StrCat("the CUDA backend is of another build: expected interface ",
                     dmuon::cuda::kModuleAbi, ", given ", abi));
  } else {
    auto backend = dmuon::cuda::CudaBackend::Create(device);
    if (backend.ok()) return backend->release();
    status = backend.status();
  }
  *code = static_cast<int>(status.code());
  std::snprintf(why, why_bytes, "%s", std::string(status.message()).c_str());
  return nullptr;
}
