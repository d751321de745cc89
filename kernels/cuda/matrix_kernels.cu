// Launchers of the kernels in matrix_kernels.cuh.
#include "kernels/cuda/launch_choice.h"
#include "kernels/cuda/matrix_kernels.cuh"

namespace dmuon::cuda {

cudaError_t LaunchNormalization(cudaStream_t stream, const NormalizationParams& params) {
  Choose(Aligned(16, params.in), [&](auto a) {
    NormalizationKernel<decltype(a)::value>
        <<<BlocksFor(params.count), kThreads, 0, stream>>>(params);
  });
  return cudaGetLastError();
}

cudaError_t LaunchNormalize(cudaStream_t stream, const float* from, const Normalization* by,
                            const PaddedShape& shape, Element element, void* to) {
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    Choose(Aligned(16, from) && shape.cols % 4 == 0, [&](auto a) {
      NormalizeKernel<T, decltype(a)::value>
          <<<BlocksFor(shape.padded_rows * shape.padded_cols), kThreads, 0, stream>>>(
              from, by, shape, static_cast<T*>(to));
    });
  });
}

cudaError_t LaunchUnpad(cudaStream_t stream, const void* from, Element element, float scale,
                        const PaddedShape& shape, float* to) {
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    Choose(Aligned(16, to) && shape.cols % 4 == 0, [&](auto a) {
      UnpadKernel<T, decltype(a)::value>
          <<<BlocksFor(shape.rows * shape.padded_cols), kThreads, 0, stream>>>(
              static_cast<const T*>(from), scale, shape, to);
    });
  });
}

cudaError_t LaunchMirror(cudaStream_t stream, Element element, void* matrix, int64_t order) {
  const int64_t tiles = order / kMirrorTile;
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    MirrorKernel<T, false><<<static_cast<unsigned>(tiles * (tiles + 1) / 2), kThreads, 0, stream>>>(
        static_cast<T*>(matrix), order, 0, 0, nullptr);
  });
}

cudaError_t LaunchMirrorShift(cudaStream_t stream, Element element, void* matrix, float scale,
                              float diagonal, void* shifted, int64_t order) {
  const int64_t tiles = order / kMirrorTile;
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    MirrorKernel<T, true><<<static_cast<unsigned>(tiles * (tiles + 1) / 2), kThreads, 0, stream>>>(
        static_cast<T*>(matrix), order, scale, diagonal, static_cast<T*>(shifted));
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
