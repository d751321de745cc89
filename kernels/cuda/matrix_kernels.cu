// Launchers of the kernels in matrix_kernels.cuh.
#include "kernels/cuda/launch_choice.h"
#include "kernels/cuda/matrix_kernels.cuh"

namespace dmuon::cuda {

namespace {

template <typename T>
cudaError_t LoadFor() {
  return LoadNow(NormalizeKernel<T, false>, NormalizeKernel<T, true>, UnpadKernel<T, false>,
                 UnpadKernel<T, true>, MirrorKernel<T, false>, MirrorKernel<T, true>, FillKernel<T>,
                 DistanceKernel<T>);
}

}  // namespace

cudaError_t LoadMatrixKernels() {
  for (const cudaError_t error : {LoadNow(NormsKernel<false>, NormsKernel<true>), LoadFor<float>(),
                                  LoadFor<__nv_bfloat16>(), LoadFor<__half>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchNorms(cudaStream_t stream, const NormsParams& params) {
  const unsigned columns = BlocksFor(params.count);
  InParts(params, 2 * columns, [&](const NormsParams& part) {
    Choose(AllAligned(part.in, part.blocks), [&](auto a) {
      NormsKernel<decltype(a)::value><<<GridOf(columns, part.blocks), kThreads, 0, stream>>>(part);
    });
  });
  return cudaGetLastError();
}

cudaError_t LaunchNormalize(cudaStream_t stream, Element element, const NormalizeParams& params) {
  const unsigned columns = BlocksFor(params.shape.padded_rows * params.shape.padded_cols);
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    Choose(AllAligned(params.from, params.blocks) && params.shape.cols % 4 == 0, [&](auto a) {
      NormalizeKernel<T, decltype(a)::value>
          <<<GridOf(columns, params.blocks), kThreads, 0, stream>>>(params);
    });
  });
}

cudaError_t LaunchUnpad(cudaStream_t stream, Element element, const UnpadParams& params) {
  const unsigned columns = BlocksFor(params.shape.rows * params.shape.padded_cols);
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    Choose(AllAligned(params.to, params.blocks) && params.shape.cols % 4 == 0, [&](auto a) {
      UnpadKernel<T, decltype(a)::value>
          <<<GridOf(columns, params.blocks), kThreads, 0, stream>>>(params);
    });
  });
}

cudaError_t LaunchMirror(cudaStream_t stream, Element element, const MirrorParams& params) {
  const int64_t tiles = params.order / kMirrorTile;
  const dim3 grid(static_cast<unsigned>(tiles * (tiles + 1) / 2),
                  static_cast<unsigned>(params.batch));
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    Choose(params.shifted != nullptr, [&](auto s) {
      MirrorKernel<T, decltype(s)::value><<<grid, kThreads, 0, stream>>>(params);
    });
  });
}

cudaError_t LaunchFill(cudaStream_t stream, Element element, void* to, int64_t count,
                       uint32_t seed) {
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    FillKernel<T><<<BlocksFor(count), kThreads, 0, stream>>>(static_cast<T*>(to), count, seed);
  });
}

cudaError_t LaunchDistance(cudaStream_t stream, Element element, const void* a, const void* b,
                           int64_t count, const ReductionScratch& scratch, double* result) {
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    DistanceKernel<T><<<BlocksFor(count), kThreads, 0, stream>>>(
        static_cast<const T*>(a), static_cast<const T*>(b), count, scratch, result);
  });
}

}  // namespace dmuon::cuda
