// Launcher of the kernel in measure_kernels.cuh.
#include "kernels/cuda/launch_choice.h"
#include "kernels/cuda/measure_kernels.cuh"

namespace dmuon::cuda {

cudaError_t LaunchOrthogonality(cudaStream_t stream, const OrthogonalityParams& params) {
  Choose(params.rows > params.cols, [&](auto tall) {
    OrthogonalityKernel<decltype(tall)::value>
        <<<OrthogonalityBlocks(params.sample), kThreads, 0, stream>>>(params);
  });
  return cudaGetLastError();
}

}  // namespace dmuon::cuda
