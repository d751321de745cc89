// One matrix product of cuBLASLt, decided outside the step: descriptors, algorithm and workspace are fixed when it is made,
// and Run only enqueues. Column-major throughout, as cuBLAS has it.
#ifndef DMUON_KERNELS_CUDA_MATMUL_H_
#define DMUON_KERNELS_CUDA_MATMUL_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cuda/launch.h"

namespace dmuon::cuda {

// RESOURCE_EXHAUSTED: no memory for the library. INTERNAL: everything else.
absl::Status ToStatus(cublasStatus_t error, absl::string_view doing);

// D (m x n) = alpha op(A) op(B) + beta C, `batch` times at fixed strides. C and D have one layout and one element type.
// All sums are in fp32.
struct MatmulShape {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;
  int64_t lda = 0, ldb = 0, ldd = 0;
  int64_t batch = 1, stride_a = 0, stride_b = 0, stride_d = 0;  // in elements
  Element in = Element::kF16;                                   // of A and B
  Element out = Element::kF16;                                  // of C and D
  bool tf32 = false;           // factors of fp32 are rounded to TF32
  uint32_t alignment = 128;    // bytes that the addresses of A and B are a multiple of
  uint32_t alignment_d = 128;  // and those of C and D

  auto key() const {
    return std::make_tuple(m, n, k, transpose_a, transpose_b, lda, ldb, ldd, batch, stride_a,
                           stride_b, stride_d, in, out, tf32, alignment, alignment_d);
  }
};

struct MatmulOperands {
  float alpha = 1;
  const void* a = nullptr;
  const void* b = nullptr;
  float beta = 0;
  const void* c = nullptr;  // null: D's own place, not read as beta is 0
  void* d = nullptr;
};

// Memory to measure algorithms in: enough for A, B, D and the product's ProductWorkspace.
struct MeasuringGround {
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr, stop = nullptr;
  void *a = nullptr, *b = nullptr, *d = nullptr;
  void* workspace = nullptr;
};

// The library's handle of one device and the algorithms already chosen on it. Thread-safe.
class LtContext {
 public:
  static absl::StatusOr<std::unique_ptr<LtContext>> Create(int device);
  ~LtContext();

  int device() const { return device_; }
  cublasLtHandle_t handle() const { return handle_; }

 private:
  friend class Matmul;
  explicit LtContext(int device) : device_(device) {}

  const int device_;
  cublasLtHandle_t handle_ = nullptr;
  absl::Mutex mutex_;
  std::map<decltype(MatmulShape().key()), cublasLtMatmulHeuristicResult_t> chosen_
      ABSL_GUARDED_BY(mutex_);
};

class Matmul {
 public:
  // Without `ground` the library's first choice is taken, which is a function of shape, device and library version alone.
  // With it the first few are timed, once for each shape in the life of `context`.
  static absl::StatusOr<Matmul> Create(LtContext& context, const MatmulShape& shape,
                                       const MeasuringGround* ground);

  Matmul(Matmul&& other) noexcept { *this = std::move(other); }
  Matmul& operator=(Matmul&& other) noexcept;
  ~Matmul();

  // `workspace` of ProductWorkspace(m n batch) bytes, 256-byte aligned, used by no other product on another stream meanwhile.
  cublasStatus_t Run(cudaStream_t stream, const MatmulOperands& operands, void* workspace) const;

  const MatmulShape& shape() const { return shape_; }
  double flops() const {
    return 2.0 * static_cast<double>(shape_.m) * static_cast<double>(shape_.n) *
           static_cast<double>(shape_.k) * static_cast<double>(shape_.batch);
  }

 private:
  Matmul() = default;
  absl::Status MakeDescriptors();
  absl::Status ChooseAlgorithm(const MeasuringGround* ground);

  LtContext* context_ = nullptr;
  MatmulShape shape_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, d_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_ = {};
};

}  // namespace dmuon::cuda

#endif  // DMUON_KERNELS_CUDA_MATMUL_H_
