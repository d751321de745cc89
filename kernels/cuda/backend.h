// kernels::Backend on one CUDA device.
#ifndef DMUON_KERNELS_CUDA_BACKEND_H_
#define DMUON_KERNELS_CUDA_BACKEND_H_

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/newton_schulz.h"
#include "kernels/ops/backend.h"

namespace dmuon::cuda {

class CudaBackend : public kernels::Backend {
 public:
  // UNAVAILABLE: no driver, no such device, or one that this library has no code for.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(int device);

  absl::string_view name() const override { return "cuda"; }
  std::string description() const override { return description_; }

  absl::StatusOr<void*> Allocate(size_t bytes) override;
  void Free(void* memory) override;
  absl::StatusOr<kernels::Stream> CreateStream() override;
  void DestroyStream(kernels::Stream stream) override;
  absl::Status Synchronize(kernels::Stream stream) override;
  uint64_t Mark(kernels::Stream stream) override;
  absl::StatusOr<bool> Reached(kernels::Stream stream, uint64_t mark) override;
  void CopyToHost(kernels::Stream stream, void* host, const void* device, size_t bytes) override;
  void CopyFromHost(kernels::Stream stream, void* device, const void* host, size_t bytes) override;
  void Copy(kernels::Stream stream, void* to, const void* from, size_t bytes) override;

  void MeanOverRanks(kernels::Stream stream, const kernels::MeanArgs& args) override;
  void Lookahead(kernels::Stream stream, const kernels::LookaheadArgs& args) override;
  void MuonCommit(kernels::Stream stream, const kernels::MuonCommitArgs& args) override;
  void Adamw(kernels::Stream stream, const kernels::AdamwArgs& args) override;
  void Orthogonality(kernels::Stream stream, const kernels::OrthogonalityArgs& args) override;
  void Publish(kernels::Stream stream, const float* from, Dtype dtype, void* to,
               int64_t count) override;

  bool shares_by_handle() const override { return true; }
  std::string device() const override { return name_; }
  int ordinal() const override { return device_; }
  kernels::DeviceVersions versions() const override { return versions_; }
  absl::StatusOr<Backend*> OnDevice(absl::string_view device) override;
  absl::Status EnableAccess(const Backend& other) override;
  absl::StatusOr<std::unique_ptr<kernels::ImportedMemory>> Import(
      const kernels::MemoryHandle& handle) override;
  absl::Status Health() const override;
  std::optional<uint64_t> available_bytes() const override;

  kernels::StreamMemory MemoryOfStream() const override { return cuda::MemoryOfStream(); }
  absl::StatusOr<kernels::NewtonSchulzMemory> MemoryOfNewtonSchulz(
      const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols,
      int64_t blocks) const override {
    return cuda::MemoryOfNewtonSchulz(options, {rows, cols, blocks});
  }
  absl::StatusOr<std::unique_ptr<kernels::NewtonSchulz>> MakeNewtonSchulz(
      const kernels::NewtonSchulzOptions& options, int64_t rows, int64_t cols,
      int64_t blocks) override;
  // The same with choices forced. For measurements, which reach it through a loaded library: hence virtual.
  virtual absl::StatusOr<std::unique_ptr<CudaNewtonSchulz>> MakeTuned(
      const kernels::NewtonSchulzOptions& options, const NewtonSchulzTuning& tuning, int64_t rows,
      int64_t cols, int64_t blocks);

 private:
  CudaBackend(int device, std::string name, kernels::DeviceVersions versions,
              std::string description, std::unique_ptr<LtContext> context)
      : device_(device),
        name_(std::move(name)),
        versions_(versions),
        description_(std::move(description)),
        context_(std::move(context)) {}

  const int device_;
  const std::string name_;
  const kernels::DeviceVersions versions_;
  const std::string description_;
  const std::unique_ptr<LtContext> context_;
  CutRecord cuts_;
  mutable absl::Mutex others_mu_;
  std::map<int, std::unique_ptr<CudaBackend>> others_ ABSL_GUARDED_BY(others_mu_);  // by ordinal
  absl::Mutex planning_;  // one plan at a time: measurements would disturb each other
};

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_BACKEND_H_
