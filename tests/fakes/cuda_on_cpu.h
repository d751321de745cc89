// Runs CUDA kernel source on the CPU: the blocks of a grid one after the other, the threads of a block as fibers that switch
// at barriers and shuffles. Include it BEFORE the kernel source and compile with a C++20 host compiler.
//
// DMUON_FAKE_ORDER=reverse runs threads and blocks in descending order. A missing barrier is harmless in one of the orders
// and visible in the other, so tests run in both.
//
// What it cannot show: races inside a warp, coalescing, occupancy. What it does show: threads of a block that meet at
// different barriers, a barrier that part of a block never reaches, reading shared memory that nothing wrote.
#ifndef DMUON_TESTS_FAKES_CUDA_ON_CPU_H_
#define DMUON_TESTS_FAKES_CUDA_ON_CPU_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace cuda_on_cpu {

struct Warp {
  uint64_t slots[32];
  unsigned arrived = 0, live = 0;
  uint64_t round = 0;
};

// The thread and block that run now. Kernels of one process run one at a time.
struct Now {
  uint3 thread{}, block{};
  dim3 block_dim, grid_dim;
  unsigned flat = 0;
};
Now& now();

void BlockBarrier(int line);
void WarpBarrier();
Warp& CurrentWarp();

// Runs `thread` once for each thread of each block.
void RunGrid(dim3 grid, dim3 block, const std::function<void()>& thread);

template <typename T>
T Shuffle(T value, unsigned source) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = CurrentWarp();
  std::memcpy(&warp.slots[now().flat % 32], &value, sizeof(T));
  WarpBarrier();
  T result;
  std::memcpy(&result, &warp.slots[source % 32], sizeof(T));
  WarpBarrier();
  return result;
}

// A kernel found by the mangled name that the host stub registers. It copies the arguments, as a launch does, and adds to
// `words` every aligned word in them: what may be an address.
using Launch = std::function<void()> (*)(void** arguments, dim3 grid, dim3 block,
                                         std::vector<uintptr_t>* words);
std::map<std::string, Launch>& Kernels();

template <auto kKernel>
struct Register;
template <typename... A, void (*kKernel)(A...)>
struct Register<kKernel> {
  static std::function<void()> Bind(void** arguments, dim3 grid, dim3 block,
                                    std::vector<uintptr_t>* words) {
    size_t argument = 0;
    (AddWords(arguments[argument++], sizeof(A), words), ...);
    return Copy(arguments, grid, block, std::index_sequence_for<A...>());
  }
  static void AddWords(const void* value, size_t bytes, std::vector<uintptr_t>* words) {
    for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
      uintptr_t word;
      std::memcpy(&word, static_cast<const char*>(value) + at, sizeof(word));
      if (word != 0) words->push_back(word);
    }
  }
  template <size_t... I>
  static std::function<void()> Copy(void** arguments, dim3 grid, dim3 block,
                                    std::index_sequence<I...>) {
    return [grid, block, values = std::tuple<A...>(*static_cast<A*>(arguments[I])...)] {
      RunGrid(grid, block, [&] { std::apply(kKernel, values); });
    };
  }
  Register() {
    Dl_info info;
    if (dladdr(reinterpret_cast<void*>(kKernel), &info) == 0 || info.dli_sname == nullptr) {
      std::fprintf(stderr, "cuda_on_cpu: a kernel has no exported symbol\n");
      std::abort();
    }
    Kernels()[info.dli_sname] = &Bind;
  }
};

}  // namespace cuda_on_cpu

// CUDA's words, as the host compiler should read them.
#undef __global__
#define __global__ __attribute__((visibility("default"), noinline))
#undef __device__
#define __device__
#undef __shared__
#define __shared__ static
#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define threadIdx (::cuda_on_cpu::now().thread)
#define blockIdx (::cuda_on_cpu::now().block)
#define blockDim (::cuda_on_cpu::now().block_dim)
#define gridDim (::cuda_on_cpu::now().grid_dim)

inline void __syncthreads(int line = __builtin_LINE()) { ::cuda_on_cpu::BlockBarrier(line); }
inline void __threadfence() {}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return ::cuda_on_cpu::Shuffle(value,
                                (::cuda_on_cpu::now().flat % 32) ^ static_cast<unsigned>(mask));
}
template <typename T>
T atomicAdd(T* at, T add) {
  const T before = *at;
  *at = before + add;
  return before;
}
using std::fabs;

#endif  // DMUON_TESTS_FAKES_CUDA_ON_CPU_H_
