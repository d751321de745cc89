// Choosing a kernel's template arguments from run-time facts. For the launchers (.cu) alone.
#ifndef DMUON_KERNELS_CUDA_LAUNCH_CHOICE_H_
#define DMUON_KERNELS_CUDA_LAUNCH_CHOICE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.h"

namespace dmuon::cuda {

template <typename... Pointers>
bool Aligned(size_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

inline bool AllAligned(const float* base, const BlockOffsets& blocks) {
  bool aligned = Aligned(16, base);
  for (int i = 0; i < blocks.count; ++i) aligned = aligned && blocks.at[i] % 4 == 0;
  return aligned;
}

// A row of the grid for each block.
inline dim3 GridOf(unsigned columns, const BlockOffsets& blocks) {
  return dim3(columns, static_cast<unsigned>(blocks.count));
}

// Calls f with as many blocks of `params` at a time as there is scratch for: `partials` for each.
template <typename Params, typename F>
void InParts(const Params& params, unsigned partials, F f) {
  const int most = kMaxPartials / static_cast<int>(partials);
  for (int first = 0; first < params.blocks.count; first += most) {
    Params part = params;
    part.blocks.count = params.blocks.count - first < most ? params.blocks.count - first : most;
    for (int i = 0; i < part.blocks.count; ++i) part.blocks.at[i] = params.blocks.at[first + i];
    part.Skip(first);
    f(part);
  }
}

// Kernels are loaded by their first use, which takes time and memory of the device: not to be left to a step. Asking for a
// kernel's attributes is a use.
template <typename... Kernels>
cudaError_t LoadNow(Kernels... kernels) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess
                ? cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels))
                : error),
   ...);
  return error;
}

// Calls f with std::true_type or std::false_type.
template <typename F>
void Choose(bool condition, F f) {
  if (condition) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

// Calls f with a value of the element type; then the launch's error.
template <typename F>
cudaError_t ForElement(Element element, F f) {
  switch (element) {
    case Element::kF32: f(float()); return cudaGetLastError();
    case Element::kBF16: f(__nv_bfloat16()); return cudaGetLastError();
    case Element::kF16: f(__half()); return cudaGetLastError();
  }
  return cudaErrorInvalidValue;
}

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_LAUNCH_CHOICE_H_
