// Launchers of the kernels in step_kernels.cuh.
#include "kernels/cuda/launch_choice.h"
#include "kernels/cuda/step_kernels.cuh"

namespace dmuon::cuda {
cudaError_t LaunchMean(cudaStream_t stream, const MeanParams& params, Element element,
                       bool accumulate) {
  if (params.inputs.count < 1 || params.inputs.count > kMaxInputs) return cudaErrorInvalidValue;
  bool aligned = Aligned(16, params.mean);
  for (int i = 0; i < params.inputs.count; ++i)
    aligned = aligned && Aligned(16, params.inputs.at[i]);
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    Choose(aligned, [&](auto a) {
      Choose(accumulate, [&](auto b) {
        MeanKernel<T, decltype(a)::value, decltype(b)::value>
            <<<BlocksFor(params.count), kThreads, 0, stream>>>(params);
      });
    });
  });
}

cudaError_t LaunchLookahead(cudaStream_t stream, const LookaheadParams& params, bool nesterov) {
  Choose(Aligned(16, params.momentum, params.gradient, params.update), [&](auto a) {
    Choose(nesterov, [&](auto b) {
      LookaheadKernel<decltype(a)::value, decltype(b)::value>
          <<<BlocksFor(params.count), kThreads, 0, stream>>>(params);
    });
  });
  return cudaGetLastError();
}

cudaError_t LaunchMuonCommit(cudaStream_t stream, const MuonCommitParams& params,
                             Element published) {
  const bool aligned = Aligned(16, params.momentum, params.gradient, params.weight,
                               params.orthogonal, params.published);
  if (params.published == nullptr) {
    Choose(aligned, [&](auto a) {
      MuonCommitKernel<decltype(a)::value, void>
          <<<BlocksFor(params.count), kThreads, 0, stream>>>(params);
    });
    return cudaGetLastError();
  }
  return ForElement(published, [&](auto zero) {
    using T = decltype(zero);
    Choose(aligned, [&](auto a) {
      MuonCommitKernel<decltype(a)::value, T>
          <<<BlocksFor(params.count), kThreads, 0, stream>>>(params);
    });
  });
}

cudaError_t LaunchAdamw(cudaStream_t stream, const AdamwParams& params) {
  Choose(
      Aligned(16, params.weight, params.exp_avg, params.exp_avg_sq, params.gradient), [&](auto a) {
        AdamwKernel<decltype(a)::value><<<BlocksFor(params.count), kThreads, 0, stream>>>(params);
      });
  return cudaGetLastError();
}

cudaError_t LaunchPublish(cudaStream_t stream, const float* from, Element element, void* to,
                          int64_t count) {
  return ForElement(element, [&](auto zero) {
    using T = decltype(zero);
    Choose(Aligned(16, from, to), [&](auto a) {
      PublishKernel<T, decltype(a)::value>
          <<<BlocksFor(count), kThreads, 0, stream>>>(from, static_cast<T*>(to), count);
    });
  });
}

}  // namespace dmuon::cuda
