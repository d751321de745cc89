#include "kernels/cuda/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/gpu.h"
#include "base/status_macros.h"
#include "kernels/cuda/buffer.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/import.h"
#include "kernels/cuda/run_plan.h"
#include "kernels/cuda/status.h"
#include "kernels/cuda/stream.h"

namespace dmuon::cuda {
namespace {

using kernels::Stream;

constexpr int kLeastMajor = 8;  // the oldest architecture that this library has code for

// The stream, on the thread that will use it: kernels go to the thread's device.
StreamState& Of(Stream stream) {
  StreamState& state = *static_cast<StreamState*>(stream.handle);
  state.Select();
  return state;
}

// Calls f with as many blocks of `params` at a time as a kernel takes.
template <typename Params, typename F>
void ForBlocks(absl::Span<const int64_t> offsets, Params params, F f) {
  for (; !offsets.empty(); offsets.remove_prefix(static_cast<size_t>(params.blocks.count))) {
    const absl::Span<const int64_t> some =
        offsets.first(std::min<size_t>(offsets.size(), kMostTogether));
    params.blocks.count = static_cast<int>(some.size());
    std::copy(some.begin(), some.end(), params.blocks.at);
    f(params);
    params.Skip(params.blocks.count);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(int device) {
  int count = 0;
  RETURN_IF_ERROR(ToStatus(cudaGetDeviceCount(&count), "looking for CUDA devices"));
  if (device < 0 || device >= count) {
    return absl::UnavailableError(absl::StrCat("CUDA device ", device, " of ", count));
  }
  cudaDeviceProp properties = {};
  RETURN_IF_ERROR(
      ToStatus(cudaGetDeviceProperties(&properties, device), "reading the device's properties"));
  if (properties.major < kLeastMajor) {
    return absl::UnavailableError(absl::StrCat(properties.name, " has compute capability ",
                                               properties.major, ".", properties.minor,
                                               ", expected ", kLeastMajor, ".0 or newer"));
  }
  // Before there is a context, which would stay: a device that is refused is left to others.
  RETURN_IF_ERROR(CheckShareable(device));
  RETURN_IF_ERROR(Open(device, properties.name));
  for (const cudaError_t loaded : {LoadStepKernels(), LoadMatrixKernels(), LoadMeasureKernels()}) {
    RETURN_IF_ERROR(ToStatus(loaded, absl::StrCat("loading kernels onto ", properties.name)));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<LtContext> context, LtContext::Create(device));
  kernels::DeviceVersions v;
  (void)cudaDriverGetVersion(&v.driver);
  (void)cudaRuntimeGetVersion(&v.runtime);
  std::string name =
      GpuName(reinterpret_cast<const unsigned char*>(properties.uuid.bytes), properties.name);
  std::string description = absl::StrCat(
      "cuda: ", properties.name, " (sm_", properties.major, properties.minor, "), driver ",
      v.driver / 1000, ".", v.driver % 1000 / 10, ", runtime ", v.runtime / 1000, ".",
      v.runtime % 1000 / 10, ", cuBLASLt ", cublasLtGetVersion());
  return std::unique_ptr<CudaBackend>(
      new CudaBackend(device, std::move(name), v, std::move(description), std::move(context)));
}

absl::StatusOr<kernels::Backend*> CudaBackend::OnDevice(absl::string_view device) {
  if (device.empty()) {
    return absl::InvalidArgumentError(
        "gpu_uuid: expected the trainer's GPU, as this daemon computes on GPUs; given none");
  }
  ASSIGN_OR_RETURN(const int ordinal, OrdinalOf(device));
  RETURN_IF_ERROR(CheckShareable(ordinal));
  if (ordinal == device_) return this;
  absl::MutexLock lock(&others_mu_);
  std::unique_ptr<CudaBackend>& other = others_[ordinal];
  if (other == nullptr) {
    ASSIGN_OR_RETURN(other, Create(ordinal));
  }
  return other.get();
}

absl::Status CudaBackend::EnableAccess(const Backend& other) {
  ASSIGN_OR_RETURN(const int ordinal, OrdinalOf(other.device()));
  if (ordinal == device_) return absl::OkStatus();
  int can = 0;
  RETURN_IF_ERROR(ToStatus(cudaDeviceCanAccessPeer(&can, device_, ordinal), "asking for peers"));
  if (can == 0) {
    return absl::UnimplementedError(
        absl::StrCat(name_, " and ", other.device(), " cannot read each other's memory"));
  }
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_), "selecting the device"));
  const cudaError_t enabled = cudaDeviceEnablePeerAccess(ordinal, 0);
  if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return absl::OkStatus();
  }
  return ToStatus(enabled, absl::StrCat("opening ", other.device(), " to ", name_));
}

absl::StatusOr<std::unique_ptr<kernels::ImportedMemory>> CudaBackend::Import(
    const kernels::MemoryHandle& handle) {
  return ImportMemory(device_, name_, versions_, handle);
}

// After a kernel's fault every call answers with it. One that fails once and then does not is another matter.
absl::Status CudaBackend::Health() const {
  constexpr int kLooks = 2;
  absl::Status status;
  for (int i = 0; i < kLooks; ++i) {
    size_t free = 0, total = 0;
    cudaError_t error = cudaSetDevice(device_);
    if (error == cudaSuccess) error = cudaMemGetInfo(&free, &total);
    status = ToStatus(error, name_);
    if (status.ok()) break;
  }
  RETURN_IF_ERROR(status);
  if (!others_mu_.TryLock()) return absl::OkStatus();  // one is being opened, which takes its time
  for (const auto& [ordinal, other] : others_) {
    if (other != nullptr) status.Update(other->Health());
  }
  others_mu_.Unlock();
  return status;
}

std::optional<uint64_t> CudaBackend::available_bytes() const {
  size_t free = 0;
  size_t total = 0;
  if (cudaSetDevice(device_) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess)
    return std::nullopt;
  return free;
}

absl::StatusOr<void*> CudaBackend::Allocate(size_t bytes) {
  ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(device_, bytes));
  return buffer.Release();
}

void CudaBackend::Free(void* memory) {
  if (memory != nullptr) FreeDeviceMemory(device_, memory);
}

absl::StatusOr<Stream> CudaBackend::CreateStream() {
  ASSIGN_OR_RETURN(std::unique_ptr<StreamState> state, StreamState::Create(device_));
  return Stream{state.release()};
}

void CudaBackend::DestroyStream(Stream stream) { delete static_cast<StreamState*>(stream.handle); }

absl::Status CudaBackend::Synchronize(Stream stream) { return Of(stream).Synchronize(); }

uint64_t CudaBackend::Mark(Stream stream) { return Of(stream).Mark(); }

absl::StatusOr<bool> CudaBackend::Reached(Stream stream, uint64_t mark) {
  return Of(stream).Reached(mark);
}

void CudaBackend::CopyToHost(Stream stream, void* host, const void* device, size_t bytes) {
  Of(stream).CopyToHost(host, device, bytes);
}

void CudaBackend::CopyFromHost(Stream stream, void* device, const void* host, size_t bytes) {
  Of(stream).CopyFromHost(device, host, bytes);
}

void CudaBackend::Copy(Stream stream, void* to, const void* from, size_t bytes) {
  Of(stream).Note(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Of(stream).get()),
                  "copying");
}

void CudaBackend::MeanOverRanks(Stream stream, const kernels::MeanArgs& args) {
  StreamState& state = Of(stream);
  MeanParams p;
  if (args.inputs.size() > static_cast<size_t>(kMaxInputs)) {
    state.Note(absl::InvalidArgumentError(absl::StrCat(
        "a mean of ", args.inputs.size(), " ranks on one device, expected at most ", kMaxInputs)));
    return;
  }
  for (const void* input : args.inputs) p.inputs.at[p.inputs.count++] = input;
  p.count = args.count;
  p.divisor = args.divisor;
  p.mean = args.mean;
  p.square_sum = args.square_sum;
  p.scratch = state.scratch();
  state.Note(LaunchMean(state.get(), p, ToElement(args.dtype), args.accumulate), "mean over ranks");
}

void CudaBackend::Lookahead(Stream stream, const kernels::LookaheadArgs& args) {
  StreamState& state = Of(stream);
  LookaheadParams p;
  p.momentum = args.momentum;
  p.gradient = args.gradient;
  p.update = args.update;
  p.count = args.count;
  p.mu = args.mu;
  p.clip = args.clip;
  p.norms = args.norms;
  p.square_sums = args.square_sums;
  p.scratch = state.scratch();
  ForBlocks(args.offsets, p, [&](const LookaheadParams& part) {
    state.Note(LaunchLookahead(state.get(), part, args.nesterov), "lookahead");
  });
}

void CudaBackend::MuonCommit(Stream stream, const kernels::MuonCommitArgs& args) {
  StreamState& state = Of(stream);
  MuonCommitParams p;
  p.momentum = args.momentum;
  p.gradient = args.gradient;
  p.weight = args.weight;
  p.orthogonal = args.orthogonal;
  p.count = args.count;
  p.mu = args.mu;
  p.clip = args.clip;
  p.keep = 1 - args.decay;
  p.scale = args.scale;
  p.published = args.published;
  p.square_sums = args.square_sums;
  p.scratch = state.scratch();
  ForBlocks(args.offsets, p, [&](const MuonCommitParams& part) {
    state.Note(LaunchMuonCommit(state.get(), part, ToElement(args.published_dtype)), "muon commit");
  });
}

void CudaBackend::Orthogonality(Stream stream, const kernels::OrthogonalityArgs& args) {
  StreamState& state = Of(stream);
  OrthogonalityParams p;
  p.matrix = args.orthogonal;
  p.rows = args.rows;
  p.cols = args.cols;
  p.sample = kernels::OrthogonalitySample(args.rows, args.cols);
  p.square_errors = args.square_errors;
  p.scratch = state.scratch();
  ForBlocks(args.offsets, p, [&](const OrthogonalityParams& part) {
    state.Note(LaunchOrthogonality(state.get(), part), "orthogonality");
  });
}

void CudaBackend::Adamw(Stream stream, const kernels::AdamwArgs& args) {
  const double correction1 = 1 - std::pow(args.beta1, static_cast<double>(args.step));
  const double correction2 = 1 - std::pow(args.beta2, static_cast<double>(args.step));
  AdamwParams p;
  p.weight = args.weight;
  p.exp_avg = args.exp_avg;
  p.exp_avg_sq = args.exp_avg_sq;
  p.gradient = args.gradient;
  p.count = args.count;
  p.keep = static_cast<float>(1 - args.lr * args.weight_decay);
  p.one_minus_beta1 = static_cast<float>(1 - args.beta1);
  p.beta2 = static_cast<float>(args.beta2);
  p.one_minus_beta2 = static_cast<float>(1 - args.beta2);
  p.sqrt_correction2 = static_cast<float>(std::sqrt(correction2));
  p.eps = static_cast<float>(args.eps);
  p.step_size = static_cast<float>(args.lr / correction1);
  Of(stream).Note(LaunchAdamw(Of(stream).get(), p), "adamw");
}

void CudaBackend::Publish(Stream stream, const float* from, Dtype dtype, void* to, int64_t count) {
  Of(stream).Note(LaunchPublish(Of(stream).get(), from, ToElement(dtype), to, count), "publish");
}

absl::StatusOr<std::unique_ptr<kernels::NewtonSchulz>> CudaBackend::MakeNewtonSchulz(
    const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols, int64_t blocks) {
  return MakeTuned(options, {}, rows, cols, blocks);
}

absl::StatusOr<std::unique_ptr<CudaNewtonSchulz>> CudaBackend::MakeTuned(
    const kernels::NewtonSchulzOptions& options, const NewtonSchulzTuning& tuning, int64_t rows,
    int64_t cols, int64_t blocks) {
  absl::MutexLock lock(&planning_);
  return PlanOnCuda(*context_, cuts_, options, tuning, {rows, cols, blocks});
}

}  // namespace dmuon::cuda
