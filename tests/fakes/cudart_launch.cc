// Kernels: what the host stubs of nvcc 13 call.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "tests/fakes/cudart_world.h"

namespace dmuon_fakes {
namespace {

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};

// As in cuda_on_cpu.h: binds a copy of the arguments, and lists the words in them.
using Launch = Task (*)(void** arguments, dim3 grid, dim3 block, std::vector<uintptr_t>* words);

thread_local std::vector<CallConfiguration> t_configurations;

// Made on first use: kernels register themselves before main.
std::map<const void*, KernelEntry>& KernelTable() {
  static auto* const table = new std::map<const void*, KernelEntry>();
  return *table;
}

Launch FindKernel(const std::string& name) {
  static const auto find = [] {
    void* library = dlopen("libdmuon_kernels_on_cpu.so", RTLD_NOW);
    if (library == nullptr) std::fprintf(stderr, "fake_cudart: %s\n", dlerror());
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Launch (*)(const char*)>(dlsym(library, "cuda_on_cpu_find"));
  }();
  return find != nullptr ? find(name.c_str()) : nullptr;
}

cudaError_t LaunchKernel(KernelEntry& kernel, dim3 grid, dim3 block, void** arguments,
                         size_t shared, CUstream_st* stream) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 || threads > 1024 ||
      grid.y > 65535 || grid.z > 65535 || shared > 48 * 1024) {
    return cudaErrorInvalidConfiguration;
  }
  // A kernel runs on its stream's device, and that must be the thread's current one.
  if (stream == nullptr || stream->device != t_device) return cudaErrorInvalidResourceHandle;
  const Launch launch = FindKernel(kernel.name);
  if (launch == nullptr) {
    std::fprintf(stderr, "fake_cudart: no kernel %s on the CPU\n", kernel.name.c_str());
    return cudaErrorInvalidDeviceFunction;
  }
  ++W().counters.launches;
  if (!std::exchange(kernel.loaded, true)) ++W().counters.lazy_loads;
  ++kernel.launches;
  std::vector<uintptr_t> words;
  Task task;
  if (!W().instant || stream->capture != nullptr) task = launch(arguments, grid, block, &words);
  Enqueue(stream, std::move(task), std::move(words));
  return cudaSuccess;
}

}  // namespace
}  // namespace dmuon_fakes

using namespace dmuon_fakes;  // NOLINT: the C interface of what is above

extern "C" {

size_t fake_cuda_kernels(char* text, size_t bytes) {
  std::lock_guard lock(W().mutex);
  std::string all;
  for (const auto& [stub, kernel] : KernelTable()) {
    all += kernel.name + " " + std::to_string(kernel.launches) +
           (FindKernel(kernel.name) != nullptr ? " cpu\n" : " none\n");
  }
  return CopyOut(all, text, bytes);
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  KernelTable()[stub] = {name, 0};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  t_configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const CallConfiguration c = t_configurations.back();
  t_configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<void**>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  const auto found = KernelTable().find(stub);
  if (found == KernelTable().end()) return Answer(cudaErrorInvalidDeviceFunction);
  *kernel = reinterpret_cast<cudaKernel_t>(&found->second);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  ENTER("cudaLaunchKernel");
  return Answer(LaunchKernel(*reinterpret_cast<KernelEntry*>(kernel), grid, block, arguments,
                             shared, Real(stream)));
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  ENTER("cudaFuncGetAttributes");
  const auto found = KernelTable().find(stub);
  if (found == KernelTable().end()) return Answer(cudaErrorInvalidDeviceFunction);
  found->second.loaded = true;
  *attributes = {};
  return Answer(cudaSuccess);
}
cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  cudaKernel_t kernel;
  const cudaError_t error = __cudaGetKernel(&kernel, stub);
  return error != cudaSuccess ? error
                              : __cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

}  // extern "C"
