// Stands in for libcuda.so.1 as far as PyTorch asks for it: whether a device has a context. The rest it binds and never calls
// here; each says its name. Without CUDA's headers, which declare them with their arguments.
#include <cstdio>

namespace {

constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

int Refuse(const char* name) {
  std::fprintf(stderr, "fake_cuda_driver: %s does nothing here\n", name);
  return kNotSupported;
}

}  // namespace

#define REFUSE(name) \
  int name() { return Refuse(#name); }

extern "C" {

int fake_cuda_has_context(int device);  // fake_cudart.h

int cuInit(unsigned) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = fake_cuda_has_context(device);
  return 0;
}

REFUSE(cuCtxGetCurrent)
REFUSE(cuCtxSetCurrent)
REFUSE(cuDeviceGet)
REFUSE(cuDeviceGetAttribute)
REFUSE(cuDevicePrimaryCtxRetain)
REFUSE(cuFuncGetAttribute)
REFUSE(cuFuncSetAttribute)
REFUSE(cuFuncSetCacheConfig)
REFUSE(cuGetErrorString)
REFUSE(cuLaunchCooperativeKernel)
REFUSE(cuLaunchKernel)
REFUSE(cuLinkAddData_v2)
REFUSE(cuLinkComplete)
REFUSE(cuLinkCreate_v2)
REFUSE(cuModuleGetFunction)
REFUSE(cuModuleLoad)
REFUSE(cuModuleLoadData)
REFUSE(cuModuleLoadDataEx)
REFUSE(cuModuleUnload)
REFUSE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSE(cuPointerGetAttribute)
REFUSE(cuTensorMapEncodeTiled)

}  // extern "C"
