// Z3 on a device that is behind: what the thread that launches kernels waits for. On the stand-ins for CUDA.
#include <dlfcn.h>

#include <atomic>
#include <functional>
#include <thread>

#include "client/session_impl.h"
#include "tests/e2e/e2e_test_base.h"
#include "tests/fakes/fake_cudart.h"

namespace dmuon::testing {
namespace {

template <typename F>
F* Fake(const char* name) {
  void* runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);
  return runtime == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(runtime, name));
}

using CudaWindows = E2eTest;

TEST_F(CudaWindows, MaterializeWaitsForNothingOfOtherWindows) {
  auto trainer = Trainer::Start(endpoint(), {.job = "behind", .z3 = true}, 0);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  client::Session& session = (*trainer)->session();
  ASSERT_NE(session.window(0), session.window(1));
  const client::CudaRuntime& cuda = *session.impl().cuda;
  void* stream = nullptr;
  ASSERT_TRUE(cuda.Check(cuda.stream_create(&stream, 1), "creating a stream").ok());
  auto* const enqueue = Fake<decltype(fake_cuda_enqueue_when)>("fake_cuda_enqueue_when");
  auto* const notify = Fake<decltype(fake_cuda_notify)>("fake_cuda_notify");
  ASSERT_TRUE(enqueue != nullptr && notify != nullptr);

  // The device is busy with boundary 1, and boundary 0 comes next.
  ASSERT_TRUE(session.Materialize(1).ok());
  std::atomic<bool> goes_on = false;
  ASSERT_TRUE(enqueue(
      static_cast<cudaStream_t>(stream), [&] { return goes_on.load(); }, [] {}));
  ASSERT_TRUE(session.Release(1, {stream}).ok());
  absl::Status other;
  std::atomic<bool> granted = false;
  std::thread launching([&] {
    other = session.Materialize(0);
    granted = true;
  });
  EXPECT_TRUE(Eventually([&] { return granted.load(); }, absl::Seconds(20)));
  goes_on = true;
  notify();
  launching.join();
  EXPECT_TRUE(other.ok()) << other;

  // Its own window is another matter: the same record of the same thread comes first.
  EXPECT_TRUE(session.Materialize(1).ok());
  EXPECT_TRUE(session.Release(0).ok());
  EXPECT_TRUE(session.Release(1).ok());
  EXPECT_TRUE((*trainer)->Train(2).ok());
  EXPECT_TRUE((*trainer)->Close().ok());
  cuda.stream_destroy(stream);
}

}  // namespace
}  // namespace dmuon::testing
