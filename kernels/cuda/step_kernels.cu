// Launchers of the kernels in step_kernels.cuh.
#include "kernels/cuda/launch_choice.h"
#include "kernels/cuda/step_kernels.cuh"

namespace dmuon::cuda {
namespace {

template <typename T>
cudaError_t LoadFor() {
  return LoadNow(MeanKernel<T, false, false>, MeanKernel<T, false, true>,
                 MeanKernel<T, true, false>, MeanKernel<T, true, true>, PublishKernel<T, false>,
                 PublishKernel<T, true>, MuonCommitKernel<false, T>, MuonCommitKernel<true, T>);
}

template <bool kAligned>
cudaError_t LoadFor() {
  return LoadNow(LookaheadKernel<kAligned, false, false>, LookaheadKernel<kAligned, false, true>,
                 LookaheadKernel<kAligned, true, false>, LookaheadKernel<kAligned, true, true>,
                 MuonCommitKernel<kAligned, void>, AdamwKernel<kAligned>);
}

}  // namespace

cudaError_t LoadStepKernels() {
  for (const cudaError_t error : {LoadFor<float>(), LoadFor<__nv_bfloat16>(), LoadFor<__half>(),
                                  LoadFor<false>(), LoadFor<true>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

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
  const unsigned columns = BlocksFor(params.count);
  InParts(params, 2 * columns, [&](const LookaheadParams& part) {
    const bool aligned =
        AllAligned(part.update, part.blocks) && Aligned(16, part.momentum, part.gradient);
    Choose(aligned, [&](auto a) {
      Choose(nesterov, [&](auto b) {
        Choose(part.norms != nullptr, [&](auto c) {
          LookaheadKernel<decltype(a)::value, decltype(b)::value, decltype(c)::value>
              <<<GridOf(columns, part.blocks), kThreads, 0, stream>>>(part);
        });
      });
    });
  });
  return cudaGetLastError();
}

cudaError_t LaunchMuonCommit(cudaStream_t stream, const MuonCommitParams& params,
                             Element published) {
  const unsigned columns = BlocksFor(params.count);
  cudaError_t error = cudaSuccess;
  InParts(params, 2 * columns, [&](const MuonCommitParams& part) {
    const dim3 grid = GridOf(columns, part.blocks);
    const bool aligned = AllAligned(part.weight, part.blocks) &&
                         Aligned(16, part.momentum, part.gradient, part.orthogonal, part.published);
    Choose(aligned, [&](auto a) {
      if (part.published == nullptr) {
        MuonCommitKernel<decltype(a)::value, void><<<grid, kThreads, 0, stream>>>(part);
        return;
      }
      const cudaError_t launched = ForElement(published, [&](auto zero) {
        MuonCommitKernel<decltype(a)::value, decltype(zero)><<<grid, kThreads, 0, stream>>>(part);
      });
      if (error == cudaSuccess) error = launched;
    });
  });
  return error != cudaSuccess ? error : cudaGetLastError();
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
