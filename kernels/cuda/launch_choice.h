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
