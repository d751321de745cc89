// The CUDA backend as the product loads it, and arrays on its device, for tests. Without a device the tests fail: they are
// registered on the stand-ins of tests/fakes, and run on a real GPU by scripts/gpu_check.sh.
#ifndef DMUON_TESTS_CUDA_DEVICE_H_
#define DMUON_TESTS_CUDA_DEVICE_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/loader.h"
#include "kernels/ops/backend.h"
#include "tests/fakes/fake_cudart.h"

namespace dmuon::cuda {

// A function of the stand-in, or null on real hardware.
template <typename F>
F* Fake(const char* name) {
  void* runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
  return runtime == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(runtime, name));
}

// After the tests of a file: each kernel of the module whose name has one of `names` was launched by one of them. Not asked
// where only some tests run, nor on real hardware.
class KernelCoverage : public testing::Environment {
 public:
  explicit KernelCoverage(std::vector<std::string> names) : names_(std::move(names)) {}
  void TearDown() override {
    const auto kernels = Fake<size_t(char*, size_t)>("fake_cuda_kernels");
    if (kernels == nullptr || testing::GTEST_FLAG(filter) != "*") return;
    std::string text(kernels(nullptr, 0) + 1, 0);
    (void)kernels(text.data(), text.size());
    std::istringstream lines(text.c_str());
    std::string name, body;
    int launches = 0, found = 0;
    while (lines >> name >> launches >> body) {
      EXPECT_EQ(body, "cpu") << name;
      for (const std::string& wanted : names_) {
        if (name.find(wanted) == std::string::npos) continue;
        ++found;
        EXPECT_GT(launches, 0) << name << " is not launched by these tests";
      }
    }
    EXPECT_GE(found, static_cast<int>(names_.size()));
    EXPECT_EQ(Fake<FakeCudaCounters()>("fake_cuda_counters")().lazy_loads, 0) << "kernels";
  }

 private:
  const std::vector<std::string> names_;
};

class DeviceTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (backend_ != nullptr) return;
    auto loaded = LoadBackend(0);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    backend_ = loaded->release();
  }
  void SetUp() override {
    ASSERT_NE(backend_, nullptr);
    auto stream = backend().CreateStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *stream;
  }
  void TearDown() override {
    for (void* memory : memory_) backend().Free(memory);
    if (stream_.handle != nullptr) backend().DestroyStream(stream_);
  }

  static kernels::Backend& backend() { return *backend_; }
  kernels::Stream stream() const { return stream_; }

  void* Bytes(size_t bytes) {
    auto memory = backend().Allocate(bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_.push_back(*memory);
    return *memory;
  }
  // A copy of `host` that starts `shift` elements after an aligned address.
  template <typename T>
  T* OnDevice(const std::vector<T>& host, size_t shift = 0) {
    T* memory = static_cast<T*>(Bytes((host.size() + shift) * sizeof(T))) + shift;
    backend().CopyFromHost(stream_, memory, host.data(), host.size() * sizeof(T));
    return memory;
  }
  template <typename T>
  std::vector<T> ToHost(const T* device, size_t count) {
    std::vector<T> host(count);
    backend().CopyToHost(stream_, host.data(), device, count * sizeof(T));
    const absl::Status status = backend().Synchronize(stream_);
    EXPECT_TRUE(status.ok()) << status;
    return host;
  }

 private:
  static inline kernels::Backend* backend_ =
      nullptr;  // for the process: the library stays loaded, too
  kernels::Stream stream_;
  std::vector<void*> memory_;
};

// Host values as elements of `dtype`, byte by byte, and what they are worth after that rounding.
struct Encoded {
  std::vector<uint8_t> bytes;
  std::vector<double> values;
};

inline Encoded Encode(const std::vector<float>& values, Dtype dtype) {
  Encoded e;
  e.bytes.resize(values.size() * ByteSize(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    switch (dtype) {
      case Dtype::kF32: {
        std::memcpy(&e.bytes[4 * i], &values[i], 4);
        e.values.push_back(values[i]);
        break;
      }
      case Dtype::kBF16: {
        const __nv_bfloat16 x = __float2bfloat16_rn(values[i]);
        std::memcpy(&e.bytes[2 * i], &x, 2);
        e.values.push_back(__bfloat162float(x));
        break;
      }
      case Dtype::kF16: {
        const __half x = __float2half_rn(values[i]);
        std::memcpy(&e.bytes[2 * i], &x, 2);
        e.values.push_back(__half2float(x));
        break;
      }
    }
  }
  return e;
}

}  // namespace dmuon::cuda

#endif  // DMUON_TESTS_CUDA_DEVICE_H_
