// Functions of the runtime that PyTorch's libraries bind when they are loaded, and that do nothing here but say their name.
// Without CUDA's headers, which declare them with their arguments.
#include <cstdio>

namespace {

constexpr int kNotSupported = 801;  // cudaErrorNotSupported

int Refuse(const char* name) {
  std::fprintf(stderr, "fake_cudart: %s does nothing here\n", name);
  return kNotSupported;
}

}  // namespace

#define REFUSE(name) \
  int name() { return Refuse(#name); }

extern "C" {

REFUSE(cudaDeviceGetDefaultMemPool)
REFUSE(cudaDeviceGetGraphMemAttribute)
REFUSE(cudaDeviceSetGraphMemAttribute)
REFUSE(cudaFuncSetAttribute)
REFUSE(cudaGetSymbolAddress)
REFUSE(cudaGraphAddNode)
REFUSE(cudaGraphConditionalHandleCreate)
REFUSE(cudaGraphNodeGetDependencies)
REFUSE(cudaGraphRetainUserObject)
REFUSE(cudaHostRegister)
REFUSE(cudaHostUnregister)
REFUSE(cudaIpcGetEventHandle)
REFUSE(cudaIpcOpenEventHandle)
REFUSE(cudaKernelSetAttributeForDevice)
REFUSE(cudaLaunchCooperativeKernel)
REFUSE(cudaLaunchKernelExC)
REFUSE(cudaLibraryGetGlobal)
REFUSE(cudaLibraryGetKernel)
REFUSE(cudaLibraryGetKernelCount)
REFUSE(cudaLibraryGetManaged)
REFUSE(cudaLibraryGetUnifiedFunction)
REFUSE(cudaLibraryLoadData)
REFUSE(cudaLibraryLoadFromFile)
REFUSE(cudaLibraryUnload)
REFUSE(cudaMallocManaged)
REFUSE(cudaMemPoolGetAttribute)
REFUSE(cudaMemPoolSetAccess)
REFUSE(cudaMemPoolSetAttribute)
REFUSE(cudaMemPoolTrimTo)
REFUSE(cudaMemcpy2DAsync)
REFUSE(cudaMemcpyToSymbol)
REFUSE(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSE(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
REFUSE(cudaProfilerStart)
REFUSE(cudaProfilerStop)
REFUSE(cudaStreamAddCallback)
REFUSE(cudaStreamBeginCaptureToGraph)
REFUSE(cudaStreamCreate)
REFUSE(cudaStreamUpdateCaptureDependencies)
REFUSE(cudaUserObjectCreate)
REFUSE(cudaUserObjectRelease)

}  // extern "C"
