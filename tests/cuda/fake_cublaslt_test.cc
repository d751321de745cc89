// What the stand-in for cuBLASLt refuses, and that it multiplies.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace dmuon::cuda {
namespace {

constexpr uint64_t kRows = 8, kDepth = 16, kCols = 4;

// C (8 x 4) = A (8 x 16) B (16 x 4) in fp32, column-major, with the alignment that was promised.
class FakeCublasLt : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cublasLtCreate(&handle_), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
              CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cublasLtMatrixLayoutCreate(&a_layout_, CUDA_R_32F, kRows, kDepth, kRows),
              CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cublasLtMatrixLayoutCreate(&b_layout_, CUDA_R_32F, kDepth, kCols, kDepth),
              CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cublasLtMatrixLayoutCreate(&c_layout_, CUDA_R_32F, kRows, kCols, kRows),
              CUBLAS_STATUS_SUCCESS);
    cublasLtMatmulPreference_t preference = nullptr;
    ASSERT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
    int found = 0;
    cublasLtMatmulHeuristicResult_t result;
    ASSERT_EQ(cublasLtMatmulAlgoGetHeuristic(handle_, operation_, a_layout_, b_layout_, c_layout_,
                                             c_layout_, preference, 1, &result, &found),
              CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(found, 1);
    algorithm_ = result.algo;
    ASSERT_EQ(cublasLtMatmulPreferenceDestroy(preference), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    a_ = Ones(kRows * kDepth);
    b_ = Ones(kDepth * kCols);
    c_ = Ones(kRows * kCols);
  }
  void TearDown() override {
    for (float* memory : {a_, b_, c_}) EXPECT_EQ(cudaFree(memory), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    for (auto layout : {a_layout_, b_layout_, c_layout_})
      EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescDestroy(operation_), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtDestroy(handle_), CUBLAS_STATUS_SUCCESS);
  }

  static float* Ones(size_t count) {
    void* memory = nullptr;
    const std::vector<float> ones(count, 1.0f);
    EXPECT_EQ(cudaMalloc(&memory, count * sizeof(float)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(memory, ones.data(), count * sizeof(float), cudaMemcpyHostToDevice),
              cudaSuccess);
    return static_cast<float*>(memory);
  }
  cublasStatus_t Multiply(const float* a, const float* b, float* c) {
    const float alpha = 2, beta = 0;
    return cublasLtMatmul(handle_, operation_, &alpha, a, a_layout_, b, b_layout_, &beta, c,
                          c_layout_, c, c_layout_, &algorithm_, nullptr, 0, stream_);
  }

  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t operation_ = nullptr;
  cublasLtMatrixLayout_t a_layout_ = nullptr, b_layout_ = nullptr, c_layout_ = nullptr;
  cublasLtMatmulAlgo_t algorithm_ = {};
  cudaStream_t stream_ = nullptr;
  float *a_ = nullptr, *b_ = nullptr, *c_ = nullptr;
};

TEST_F(FakeCublasLt, MultipliesWhenItsStreamComesToIt) {
  ASSERT_EQ(Multiply(a_, b_, c_), CUBLAS_STATUS_SUCCESS);
  std::vector<float> result(kRows * kCols);
  ASSERT_EQ(cudaMemcpyAsync(result.data(), c_, result.size() * sizeof(float),
                            cudaMemcpyDeviceToHost, stream_),
            cudaSuccess);
  EXPECT_EQ(result, std::vector<float>(kRows * kCols, 2.0f * kDepth));
}

TEST_F(FakeCublasLt, RefusesOperandsOutsideTheirAllocationOrInTheHostsMemory) {
  const std::vector<float> host(kRows * kDepth);
  EXPECT_EQ(Multiply(host.data(), b_, c_), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Multiply(a_ + 64, b_, c_), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Multiply(a_, b_, b_ + 32), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(FakeCublasLt, RefusesLessAlignmentThanWasPromisedAndAResultOverAFactor) {
  float* roomy = Ones(4 * kRows * kDepth);
  EXPECT_EQ(Multiply(roomy + 1, b_, c_), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Multiply(roomy, b_, roomy), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(Multiply(roomy, b_, c_), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(cudaFree(roomy), cudaSuccess);
}

TEST_F(FakeCublasLt, RefusesLayoutsWhoseColumnsOverlapAndShapesThatDoNotFit) {
  cublasLtMatrixLayout_t layout = nullptr;
  EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 8, 4, 7), CUBLAS_STATUS_INVALID_VALUE);
  std::swap(a_layout_, b_layout_);
  EXPECT_EQ(Multiply(a_, b_, c_), CUBLAS_STATUS_INVALID_VALUE);
  std::swap(a_layout_, b_layout_);
}

}  // namespace
}  // namespace dmuon::cuda

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
