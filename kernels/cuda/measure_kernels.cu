// Launcher of the kernel in measure_kernels.cuh.
#include "kernels/cuda/launch_choice.h"
#include "kernels/cuda/measure_kernels.cuh"

namespace dmuon::cuda {

cudaError_t LoadMeasureKernels() {
  return LoadNow(OrthogonalityKernel<false>, OrthogonalityKernel<true>);
}

cudaError_t LaunchOrthogonality(cudaStream_t stream, const OrthogonalityParams& params) {
  const unsigned columns = OrthogonalityBlocks(params.sample);
  InParts(params, columns * kProducts, [&](const OrthogonalityParams& part) {
    Choose(params.rows > params.cols, [&](auto tall) {
      OrthogonalityKernel<decltype(tall)::value>
          <<<GridOf(columns, part.blocks), kThreads, 0, stream>>>(part);
    });
  });
  return cudaGetLastError();
}

}  // namespace dmuon::cuda
