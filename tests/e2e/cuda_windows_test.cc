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

// A session of two boundaries in two windows, a stream that is busy until it is told to go on, and one that is not.
class CudaWindows : public E2eTest {
 protected:
  void SetUp() override {
    E2eTest::SetUp();
    auto trainer = Trainer::Start(endpoint(), {.job = "behind", .z3 = true}, 0);
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    trainer_ = *std::move(trainer);
    ASSERT_NE(session().window(0), session().window(1));
    enqueue_ = Fake<decltype(fake_cuda_enqueue_when)>("fake_cuda_enqueue_when");
    notify_ = Fake<decltype(fake_cuda_notify)>("fake_cuda_notify");
    ASSERT_TRUE(enqueue_ != nullptr && notify_ != nullptr);
    for (void** stream : {&busy_, &idle_}) ASSERT_EQ((*cuda_)->stream_create(stream, 1), 0);
    ASSERT_TRUE(enqueue_(
        static_cast<cudaStream_t>(busy_), [this] { return goes_on_.load(); }, [] {}));
  }
  void TearDown() override {
    GoOn();
    if (trainer_ != nullptr) EXPECT_TRUE(trainer_->Close().ok());
    for (void* stream : {busy_, idle_}) (*cuda_)->stream_destroy(stream);
    E2eTest::TearDown();
  }
  client::Session& session() { return trainer_->session(); }
  void GoOn() {
    goes_on_ = true;
    if (notify_ != nullptr) notify_();
  }
  // While the device is busy.
  void ExpectGranted(int boundary) {
    absl::Status status;
    std::atomic<bool> granted = false;
    std::thread launching([&] {
      status = session().Materialize(boundary);
      granted = true;
    });
    EXPECT_TRUE(Eventually([&] { return granted.load(); }, absl::Seconds(20)));
    GoOn();
    launching.join();
    EXPECT_TRUE(status.ok()) << status;
  }

  const absl::StatusOr<const client::CudaRuntime*> cuda_ = client::CudaRuntime::Load();
  std::unique_ptr<Trainer> trainer_;
  void *busy_ = nullptr, *idle_ = nullptr;
  std::atomic<bool> goes_on_ = false;
  decltype(&fake_cuda_enqueue_when) enqueue_ = nullptr;
  decltype(&fake_cuda_notify) notify_ = nullptr;
};

TEST_F(CudaWindows, MaterializeWaitsForNothingOfOtherWindows) {
  ASSERT_TRUE(session().Materialize(1).ok());
  ASSERT_TRUE(session().Release(1, {busy_}).ok());
  ExpectGranted(0);
  // Its own window is another matter: the same record of the same thread comes first.
  EXPECT_TRUE(session().Materialize(1).ok());
  EXPECT_TRUE(session().Release(0).ok());
  EXPECT_TRUE(session().Release(1).ok());
  EXPECT_TRUE(trainer_->Train(2).ok());
}

// In backward: the gradients of the boundary before are still being computed when a window's last reader is done.
TEST_F(CudaWindows, AReleaseDoesNotStandBehindGradientsOfAnotherBoundary) {
  ASSERT_TRUE(session().Materialize(0).ok());
  ASSERT_TRUE(session().Materialize(1).ok());
  ASSERT_TRUE(session().Ready(1, {busy_}).ok());
  ASSERT_TRUE(session().Release(0, {idle_}).ok());
  ExpectGranted(0);
}

}  // namespace
}  // namespace dmuon::testing
