// One test on each backend of the list that this machine has, and arrays in its memory.
#ifndef DMUON_TESTS_KERNELS_EACH_BACKEND_H_
#define DMUON_TESTS_KERNELS_EACH_BACKEND_H_

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/ops/backend.h"

namespace dmuon::kernels {

constexpr uint64_t kSeed = 7;
inline std::vector<float> Normal(int64_t count, uint64_t seed, float scale = 1) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

class EachBackend : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    auto backend = CreateBackend(GetParam(), 2);
    if (absl::IsUnavailable(backend.status())) GTEST_SKIP() << backend.status();
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    auto stream = backend_->CreateStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *stream;
  }
  void TearDown() override {
    if (backend_ == nullptr) return;
    Sync();
    for (void* memory : owned_) backend_->Free(memory);
    backend_->DestroyStream(stream_);
  }

  void* Bytes(size_t bytes) {
    auto memory = backend_->Allocate(bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    owned_.push_back(*memory);
    return *memory;
  }
  template <typename T>
  T* Device(const std::vector<T>& values) {
    T* memory = static_cast<T*>(Bytes(values.size() * sizeof(T)));
    backend_->CopyFromHost(stream_, memory, values.data(), values.size() * sizeof(T));
    Sync();  // `values` may go
    return memory;
  }
  template <typename T>
  std::vector<T> Host(const T* memory, int64_t count) {
    std::vector<T> values(count);
    backend_->CopyToHost(stream_, values.data(), memory, count * sizeof(T));
    Sync();
    return values;
  }
  void Sync() {
    const absl::Status status = backend_->Synchronize(stream_);
    EXPECT_TRUE(status.ok()) << status;
  }

  std::unique_ptr<Backend> backend_;
  Stream stream_;
  std::vector<void*> owned_;
};

inline const auto kEachName =
    testing::ValuesIn(std::vector<std::string>(BackendNames().begin(), BackendNames().end()));

}  // namespace dmuon::kernels

#endif  // DMUON_TESTS_KERNELS_EACH_BACKEND_H_
