// Every kernel of the CUDA backend, compiled for the CPU from the source that nvcc compiles for the device.
#include "tests/fakes/cuda_on_cpu.h"

// clang-format off: the words of CUDA must be defined first
#include "kernels/cuda/matrix_kernels.cuh"
#include "kernels/cuda/measure_kernels.cuh"
#include "kernels/cuda/step_kernels.cuh"
// clang-format on

namespace dmuon::cuda {
namespace {

using cuda_on_cpu::Register;

template <typename T>
struct ForElement {
  Register<&MeanKernel<T, false, false>> mean00;
  Register<&MeanKernel<T, false, true>> mean01;
  Register<&MeanKernel<T, true, false>> mean10;
  Register<&MeanKernel<T, true, true>> mean11;
  Register<&PublishKernel<T, false>> publish0;
  Register<&PublishKernel<T, true>> publish1;
  Register<&NormalizeKernel<T, false>> normalize0;
  Register<&NormalizeKernel<T, true>> normalize1;
  Register<&UnpadKernel<T, false>> unpad0;
  Register<&UnpadKernel<T, true>> unpad1;
  Register<&MirrorKernel<T, false>> mirror0;
  Register<&MirrorKernel<T, true>> mirror1;
  Register<&MuonCommitKernel<false, T>> commit0;
  Register<&MuonCommitKernel<true, T>> commit1;
  Register<&FillKernel<T>> fill;
  Register<&DistanceKernel<T>> distance;
};

struct All {
  ForElement<float> fp32;
  ForElement<__nv_bfloat16> bf16;
  ForElement<__half> fp16;
  Register<&LookaheadKernel<false, false, false>> lookahead000;
  Register<&LookaheadKernel<false, false, true>> lookahead001;
  Register<&LookaheadKernel<false, true, false>> lookahead010;
  Register<&LookaheadKernel<false, true, true>> lookahead011;
  Register<&LookaheadKernel<true, false, false>> lookahead100;
  Register<&LookaheadKernel<true, false, true>> lookahead101;
  Register<&LookaheadKernel<true, true, false>> lookahead110;
  Register<&LookaheadKernel<true, true, true>> lookahead111;
  Register<&MuonCommitKernel<false, void>> commit0;
  Register<&MuonCommitKernel<true, void>> commit1;
  Register<&AdamwKernel<false>> adamw0;
  Register<&AdamwKernel<true>> adamw1;
  Register<&NormsKernel<false>> norms0;
  Register<&NormsKernel<true>> norms1;
  Register<&OrthogonalityKernel<false>> orthogonality0;
  Register<&OrthogonalityKernel<true>> orthogonality1;
};
const All g_all;

}  // namespace
}  // namespace dmuon::cuda
