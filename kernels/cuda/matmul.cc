#include "kernels/cuda/matmul.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/graph.h"
#include "kernels/cuda/places.h"
#include "kernels/cuda/status.h"

namespace dmuon::cuda {

absl::Status ToStatus(cublasStatus_t error, absl::string_view doing) {
  if (error == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(doing, ": ", cublasLtGetStatusName(error));
  if (error == CUBLAS_STATUS_ALLOC_FAILED) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

namespace {

constexpr int kCandidates = 6;

cudaDataType_t CudaType(Element element) {
  switch (element) {
    case Element::kF32: return CUDA_R_32F;
    case Element::kBF16: return CUDA_R_16BF;
    case Element::kF16: return CUDA_R_16F;
  }
  return CUDA_R_32F;
}

absl::Status Layout(cublasLtMatrixLayout_t* layout, Element element, int64_t rows, int64_t cols,
                    int64_t ld, const MatmulShape& shape, int64_t stride) {
  RETURN_IF_ERROR(
      ToStatus(cublasLtMatrixLayoutCreate(layout, CudaType(element), static_cast<uint64_t>(rows),
                                          static_cast<uint64_t>(cols), ld),
               "describing a matrix"));
  if (shape.batch == 1) return absl::OkStatus();
  const auto batch = static_cast<int32_t>(shape.batch);
  RETURN_IF_ERROR(ToStatus(cublasLtMatrixLayoutSetAttribute(
                               *layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)),
                           "describing a batch"));
  return ToStatus(
      cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                       &stride, sizeof(stride)),
      "describing a batch");
}

}  // namespace

absl::StatusOr<std::unique_ptr<LtContext>> LtContext::Create(int device) {
  auto context = std::unique_ptr<LtContext>(new LtContext(device));
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(device), "selecting the device"));
  RETURN_IF_ERROR(ToStatus(cublasLtCreate(&context->handle_), "starting cuBLASLt"));
  return context;
}

LtContext::~LtContext() {
  if (handle_ != nullptr) (void)cublasLtDestroy(handle_);
}

Matmul& Matmul::operator=(Matmul&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(shape_, other.shape_);
  std::swap(operation_, other.operation_);
  std::swap(a_, other.a_);
  std::swap(b_, other.b_);
  std::swap(d_, other.d_);
  std::swap(choice_, other.choice_);
  return *this;
}

Matmul::~Matmul() {
  if (d_ != nullptr) (void)cublasLtMatrixLayoutDestroy(d_);
  if (b_ != nullptr) (void)cublasLtMatrixLayoutDestroy(b_);
  if (a_ != nullptr) (void)cublasLtMatrixLayoutDestroy(a_);
  if (operation_ != nullptr) (void)cublasLtMatmulDescDestroy(operation_);
}

absl::StatusOr<Matmul> Matmul::Create(LtContext& context, const MatmulShape& shape,
                                      const MeasuringGround* ground) {
  Matmul matmul;
  matmul.context_ = &context;
  matmul.shape_ = shape;
  RETURN_IF_ERROR(matmul.MakeDescriptors());
  RETURN_IF_ERROR(Annotate(
      matmul.ChooseAlgorithm(ground),
      absl::StrCat("product ", shape.m, "x", shape.n, "x", shape.k, ", batch ", shape.batch)));
  return matmul;
}

absl::Status Matmul::MakeDescriptors() {
  // CUBLAS_COMPUTE_32F on fp32 inputs is real fp32.
  const cublasComputeType_t compute =
      shape_.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  RETURN_IF_ERROR(
      ToStatus(cublasLtMatmulDescCreate(&operation_, compute, CUDA_R_32F), "describing a product"));
  const cublasOperation_t op_a = shape_.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t op_b = shape_.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  RETURN_IF_ERROR(ToStatus(
      cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)),
      "describing a product"));
  RETURN_IF_ERROR(ToStatus(
      cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)),
      "describing a product"));
  const auto [a_rows, a_cols] =
      shape_.transpose_a ? std::pair(shape_.k, shape_.m) : std::pair(shape_.m, shape_.k);
  const auto [b_rows, b_cols] =
      shape_.transpose_b ? std::pair(shape_.n, shape_.k) : std::pair(shape_.k, shape_.n);
  RETURN_IF_ERROR(Layout(&a_, shape_.in, a_rows, a_cols, shape_.lda, shape_, shape_.stride_a));
  RETURN_IF_ERROR(Layout(&b_, shape_.in, b_rows, b_cols, shape_.ldb, shape_, shape_.stride_b));
  return Layout(&d_, shape_.out, shape_.m, shape_.n, shape_.ldd, shape_, shape_.stride_d);
}

absl::Status Matmul::ChooseAlgorithm(const MeasuringGround* ground) {
  if (ground != nullptr) {
    absl::MutexLock lock(&context_->mutex_);
    const auto known = context_->chosen_.find(shape_.key());
    if (known != context_->chosen_.end()) {
      choice_ = known->second;
      return absl::OkStatus();
    }
  }
  cublasLtMatmulPreference_t preference = nullptr;
  RETURN_IF_ERROR(ToStatus(cublasLtMatmulPreferenceCreate(&preference), "asking for algorithms"));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    (void)cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
         uint64_t{ProductWorkspace(shape_.m * shape_.n * shape_.batch)});
  // The library takes 256 for granted; blocks of a matrix start at multiples of 64 elements.
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape_.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape_.alignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape_.alignment_d);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape_.alignment_d);
  cublasLtMatmulHeuristicResult_t found[kCandidates] = {};
  int count = 0;
  const cublasStatus_t asked = cublasLtMatmulAlgoGetHeuristic(
      context_->handle_, operation_, a_, b_, d_, d_, preference, kCandidates, found, &count);
  (void)cublasLtMatmulPreferenceDestroy(preference);
  RETURN_IF_ERROR(ToStatus(asked, "asking for algorithms"));
  const auto* const usable = std::find_if(found, found + count, [](const auto& candidate) {
    return candidate.state == CUBLAS_STATUS_SUCCESS;
  });
  if (usable == found + count) return absl::InternalError("cuBLASLt knows no algorithm");
  choice_ = *usable;
  if (ground == nullptr || count == 1) return absl::OkStatus();

  float best = -1;
  int best_index = 0;
  for (int i = 0; i < count; ++i) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
    choice_ = found[i];
    const MatmulOperands operands = {
        .alpha = 1, .a = ground->a, .b = ground->b, .beta = 0, .d = ground->d};
    ASSIGN_OR_RETURN(const float time,
                     Measure(ground->stream, ground->start, ground->stop, [&]() -> absl::Status {
                       return ToStatus(Run(ground->stream, operands, ground->workspace),
                                       "timing a product");
                     }));
    if (best < 0 || time < best) {
      best = time;
      best_index = i;
    }
  }
  choice_ = found[best_index];
  absl::MutexLock lock(&context_->mutex_);
  context_->chosen_.emplace(shape_.key(), choice_);
  return absl::OkStatus();
}

cublasStatus_t Matmul::Run(cudaStream_t stream, const MatmulOperands& operands,
                           void* workspace) const {
  const void* c = operands.c != nullptr ? operands.c : operands.d;
  return cublasLtMatmul(context_->handle_, operation_, &operands.alpha, operands.a, a_, operands.b,
                        b_, &operands.beta, c, d_, operands.d, d_, &choice_.algo, workspace,
                        choice_.workspaceSize, stream);
}

}  // namespace dmuon::cuda
