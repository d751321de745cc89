// A stand-in for libcublasLt.so.13: the products that the CUDA backend asks for, by plain loops with sums in fp32. It refuses
// what the library refuses and what would read or write outside an allocation.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "tests/fakes/fake_cudart.h"

namespace {

constexpr uint64_t kUnusable = 1;  // in data[2] of an algorithm

struct Operation {
  cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
  bool tf32 = false;
};

struct Layout {
  cudaDataType_t type;
  int64_t rows, cols, ld;
  int32_t batch = 1;
  int64_t stride = 0;
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment_ab = 256, alignment_cd = 256;
};

bool AlignedTo(const void* memory, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % bytes == 0;
}

size_t Bytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

float Load(const Layout& l, const void* base, int64_t index) {
  switch (l.type) {
    case CUDA_R_16F: return __half2float(static_cast<const __half*>(base)[index]);
    case CUDA_R_16BF: return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[index]);
    default: return static_cast<const float*>(base)[index];
  }
}

void Store(const Layout& l, void* base, int64_t index, float value) {
  switch (l.type) {
    case CUDA_R_16F: static_cast<__half*>(base)[index] = __float2half_rn(value); break;
    case CUDA_R_16BF: static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16_rn(value); break;
    default: static_cast<float*>(base)[index] = value;
  }
}

const Layout& L(cublasLtMatrixLayout_t layout) { return *reinterpret_cast<const Layout*>(layout); }

bool Inside(const Layout& l, const void* base) {
  const int64_t last = (l.batch - 1) * l.stride + (l.cols - 1) * l.ld + l.rows;
  return fake_cuda_owns(base, static_cast<size_t>(last) * Bytes(l.type));
}

// op(A) row-major, so that the inner loop below runs along memory.
std::vector<float> Gather(const Layout& l, const void* base, int64_t offset, bool transpose) {
  std::vector<float> out(static_cast<size_t>(l.rows * l.cols));
  const int64_t rows = transpose ? l.cols : l.rows;
  const int64_t cols = transpose ? l.rows : l.cols;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      out[static_cast<size_t>(i * cols + j)] =
          Load(l, base, offset + (transpose ? i * l.ld + j : j * l.ld + i));
    }
  }
  return out;
}

// To nearest, of 10 bits behind the point; finite values.
float RoundToTf32(float x) {
  constexpr uint32_t kLost = 13;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + (1u << (kLost - 1)) - 1 + ((bits >> kLost) & 1)) >> kLost << kLost;
  if (!std::isfinite(x)) return x;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

// row += factor * from. Most of the time of these tests is spent here.
__attribute__((target_clones("avx512f", "avx2", "default"))) void AddScaled(float* row,
                                                                            float factor,
                                                                            const float* from,
                                                                            int64_t count) {
  for (int64_t j = 0; j < count; ++j) row[j] += factor * from[j];
}

void Multiply(const Operation& op, float alpha, const void* a, const Layout& la, const void* b,
              const Layout& lb, float beta, const void* c, void* d, const Layout& ld) {
  const int64_t depth = op.a == CUBLAS_OP_T ? la.rows : la.cols;
  const char* wrong = std::getenv("DMUON_FAKE_CUBLASLT_WRONG");
  const std::string shape = std::to_string(ld.rows) + "x" + std::to_string(ld.cols);
  const float right_or_wrong = wrong != nullptr && shape == wrong ? 1.1f : 1.0f;
  for (int64_t batch = 0; batch < ld.batch; ++batch) {
    std::vector<float> left = Gather(la, a, batch * la.stride, op.a == CUBLAS_OP_T);
    std::vector<float> right = Gather(lb, b, batch * lb.stride, op.b == CUBLAS_OP_T);
    if (op.tf32) {
      for (std::vector<float>* factor : {&left, &right}) {
        for (float& x : *factor) x = RoundToTf32(x);
      }
    }
    std::vector<float> row(static_cast<size_t>(ld.cols));
    for (int64_t i = 0; i < ld.rows; ++i) {
      std::fill(row.begin(), row.end(), 0.0f);
      for (int64_t k = 0; k < depth; ++k) {
        const float factor = left[static_cast<size_t>(i * depth + k)];
        const float* from = &right[static_cast<size_t>(k * ld.cols)];
        AddScaled(row.data(), factor, from, ld.cols);
      }
      for (int64_t j = 0; j < ld.cols; ++j) {
        const int64_t at = batch * ld.stride + j * ld.ld + i;
        const float add = beta != 0 ? beta * Load(ld, c, at) : 0;
        Store(ld, d, at, right_or_wrong * alpha * row[static_cast<size_t>(j)] + add);
      }
    }
  }
}

cublasStatus_t Refuse(const char* why) {
  std::fprintf(stderr, "fake_cublaslt: %s\n", why);
  return CUBLAS_STATUS_INVALID_VALUE;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
const char* cublasLtGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS_FAKE"; }
size_t cublasLtGetVersion() { return 0; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  const bool tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  if ((compute != CUBLAS_COMPUTE_32F && !tf32) || scale != CUDA_R_32F)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  auto* op = new Operation();
  op->tf32 = tf32;
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(op);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete reinterpret_cast<Operation*>(desc);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  auto* op = reinterpret_cast<Operation*>(desc);
  if (bytes != sizeof(cublasOperation_t)) return CUBLAS_STATUS_INVALID_VALUE;
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) {
    std::memcpy(&op->a, value, bytes);
  } else if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) {
    std::memcpy(&op->b, value, bytes);
  } else {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  if (rows == 0 || cols == 0 || ld < static_cast<int64_t>(rows))
    return Refuse("a layout whose columns overlap");
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(
      new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), ld});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<Layout*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t bytes) {
  auto* l = reinterpret_cast<Layout*>(layout);
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && bytes == sizeof(l->batch)) {
    std::memcpy(&l->batch, value, bytes);
  } else if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET &&
             bytes == sizeof(l->stride)) {
    std::memcpy(&l->stride, value, bytes);
  } else {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference());
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<Preference*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  auto* p = reinterpret_cast<Preference*>(preference);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      if (bytes != sizeof(p->workspace)) return CUBLAS_STATUS_INVALID_VALUE;
      std::memcpy(&p->workspace, value, bytes);
      return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      if (bytes != sizeof(p->alignment_ab)) return CUBLAS_STATUS_INVALID_VALUE;
      std::memcpy(&p->alignment_ab, value, bytes);
      return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      if (bytes != sizeof(p->alignment_cd)) return CUBLAS_STATUS_INVALID_VALUE;
      std::memcpy(&p->alignment_cd, value, bytes);
      return CUBLAS_STATUS_SUCCESS;
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

// Two algorithms, of which the first wants all the workspace that it may have.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* count) {
  const Preference& p = *reinterpret_cast<Preference*>(preference);
  *count = 0;
  if (wanted > 1) {  // the library also tells of those that cannot run
    results[*count] = {};
    results[*count].state = CUBLAS_STATUS_NOT_SUPPORTED;
    results[*count].algo.data[2] = kUnusable;
    ++*count;
  }
  for (size_t workspace : {p.workspace, size_t{0}}) {
    if (*count == wanted) break;
    results[*count] = {};
    results[*count].workspaceSize = workspace;
    results[*count].algo.data[0] = p.alignment_ab;  // what was promised is checked when it runs
    results[*count].algo.data[1] = p.alignment_cd;
    ++*count;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  if (fake_cuda_enter("cublasLtMatmul") != 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  const Operation op = *reinterpret_cast<Operation*>(desc);
  const Layout la = L(a_layout), lb = L(b_layout), ld = L(d_layout);
  const int64_t m = op.a == CUBLAS_OP_T ? la.cols : la.rows;
  const int64_t ka = op.a == CUBLAS_OP_T ? la.rows : la.cols;
  const int64_t kb = op.b == CUBLAS_OP_T ? lb.cols : lb.rows;
  const int64_t n = op.b == CUBLAS_OP_T ? lb.rows : lb.cols;
  if (m != ld.rows || n != ld.cols || ka != kb) return Refuse("shapes that do not fit");
  if (la.type != lb.type || (ld.type != la.type && ld.type != CUDA_R_32F))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (la.batch != ld.batch || lb.batch != ld.batch) return Refuse("batches that do not fit");
  if (!Inside(la, a) || !Inside(lb, b) || !Inside(ld, d))
    return Refuse("an operand outside its allocation");
  const float beta_value = *static_cast<const float*>(beta);
  if (beta_value != 0 && !Inside(L(c_layout), c)) return Refuse("C outside its allocation");
  if (algo->data[2] == kUnusable) return Refuse("an algorithm that was said not to run");
  const uint64_t ab = algo->data[0], cd = algo->data[1];
  if (!AlignedTo(a, ab) || !AlignedTo(b, ab) || !AlignedTo(d, cd) ||
      (beta_value != 0 && !AlignedTo(c, cd))) {
    return Refuse("an operand that is aligned less than was promised");
  }
  if (d == a || d == b) return Refuse("a result in the place of a factor");
  if (workspace_bytes > 0 && !fake_cuda_owns(workspace, workspace_bytes))
    return Refuse("a workspace outside its allocation");
  fake_cuda_enqueue(stream, [=, alpha_value = *static_cast<const float*>(alpha)] {
    Multiply(op, alpha_value, a, la, b, lb, beta_value, c, d, ld);
    // What is kept in a workspace, or beside it by mistake, shows as NaN. Its ends will do: it may be large.
    const size_t end = std::min<size_t>(workspace_bytes, 4096);
    if (end == 0) return;
    std::memset(workspace, 0xff, end);
    std::memset(static_cast<char*>(workspace) + workspace_bytes - end, 0xff, end);
  });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
