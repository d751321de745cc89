// Arenas in device memory: what a daemon refuses at registration, each by its reason. On the stand-ins for CUDA.
#include <signal.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "client/session_impl.h"
#include "tests/e2e/configured_rank.h"

namespace dmuon::testing {
namespace {

using client::Connection;
using client::DeviceArena;
using client::Session;
using ::testing::HasSubstr;
using Request = v1::RegisterBuffersRequest;

constexpr uint64_t kMiB = 1 << 20;

class CudaRegistration : public ConfiguredRank {
 protected:
  Session::Impl& impl() { return session_->impl(); }
  Request TrueRequest() {
    Request request;
    request.set_session_id(impl().id);
    v1::Buffer* control = request.add_buffers();
    control->set_kind(v1::BUFFER_KIND_CONTROL);
    control->set_size(impl().control.bytes());
    EXPECT_TRUE(impl().DescribeArenas(request).ok());
    return request;
  }
  absl::Status Register(const Request& request) {
    v1::RegisterBuffersResponse response;
    impl().registered = true;
    return connection_->impl().Unary(&v1::Trainer::Stub::PrepareAsyncRegisterBuffers, request,
                                     response);
  }
  absl::Status Confirm(const std::vector<std::string>& found) {
    v1::ConfirmBuffersRequest request;
    request.set_session_id(impl().id);
    for (const std::string& bytes : found) request.add_found(bytes);
    v1::ConfirmBuffersResponse response;
    return connection_->impl().Unary(&v1::Trainer::Stub::PrepareAsyncConfirmBuffers, request,
                                     response);
  }
};

struct Lie {
  const char* name;
  std::function<void(Request&)> tell;
  absl::StatusCode code;
  const char* text;
};

TEST_F(CudaRegistration, EachLieIsRefusedByItsReasonAndTheTruthIsTakenAfterwards) {
  auto other = Trainer::Start(endpoint(), {.job = "other"}, 0);
  ASSERT_TRUE(other.ok()) << other.status();
  Configure("lying");
  const client::CudaRuntime& cuda = *impl().cuda;
  auto large = DeviceArena::Allocate(cuda, 0, 4 * kMiB, "large");
  auto elsewhere = DeviceArena::Allocate(cuda, 1, 2 * kMiB, "elsewhere");
  ASSERT_TRUE(large.ok() && elsewhere.ok());
  const std::string theirs = (*other)->session().impl().device_grad.handle();
  std::string own = impl().device_grad.handle();
  const pid_t daemon_pid = daemon().pid();
  std::memcpy(&own[8], &daemon_pid, sizeof(daemon_pid));  // where the stand-in keeps the exporter

  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;
  const auto grad = [](Request& r) { return r.mutable_buffers(1); };
  const Lie lies[] = {
      {"no handle", [&](Request& r) { grad(r)->clear_ipc_handle(); }, kPrecondition,
       "buffer 'grad': ipc_handle: expected a handle of memory on GPU-"},
      {"short handle", [&](Request& r) { grad(r)->mutable_ipc_handle()->pop_back(); }, kInvalid,
       "buffer 'grad': ipc_handle: expected 64 bytes, given 63"},
      {"garbage", [&](Request& r) { grad(r)->set_ipc_handle(std::string(64, 'x')); }, kInvalid,
       "cudaErrorInvalidResourceHandle: expected a handle of cudaIpcGetMemHandle"},
      {"size", [&](Request& r) { grad(r)->set_size(kMiB); }, kInvalid, "size: expected 4096"},
      {"beyond the end", [&](Request& r) { grad(r)->set_offset(2 * kMiB); }, kInvalid,
       "the allocation has 2097152"},
      {"overflow", [&](Request& r) { grad(r)->set_offset(~uint64_t{255}); }, kInvalid,
       "the allocation has 2097152"},
      {"alignment", [&](Request& r) { grad(r)->set_offset(64); }, kInvalid,
       "offset: expected a multiple of 256, got 64"},
      {"a part of more", [&](Request& r) { grad(r)->set_ipc_handle(large->handle()); }, kInvalid,
       "expected an allocation of its own, 2097152 bytes, given a part of one of 4194304"},
      {"overlap", [&](Request& r) { grad(r)->set_ipc_handle(r.buffers(2).ipc_handle()); }, kInvalid,
       "expected an allocation of its own, given that of 'grad'"},
      {"another's", [&](Request& r) { grad(r)->set_ipc_handle(theirs); },
       absl::StatusCode::kAlreadyExists, "this memory is registered already"},
      {"another device's name", [&](Request& r) { grad(r)->set_gpu_uuid(*impl().cuda->NameOf(1)); },
       kInvalid, "gpu_uuid: expected GPU-"},
      {"another device's memory", [&](Request& r) { grad(r)->set_ipc_handle(elsewhere->handle()); },
       kInvalid, "gpu_uuid: the memory is on GPU-"},
      {"the daemon's own", [&](Request& r) { grad(r)->set_ipc_handle(own); }, kPrecondition,
       "the handle looks like the daemon's own"},
      {"driver", [&](Request& r) { r.set_driver_version(12080); }, kPrecondition,
       "driver_version: expected the daemon's 13.0 (13000), given 12.8 (12080)"},
      {"runtime", [&](Request& r) { r.set_runtime_version(12060); }, kPrecondition,
       "runtime_version: expected CUDA 13 as the daemon's, given 12.6 (12060)"},
  };
  for (const Lie& lie : lies) {
    Request request = TrueRequest();
    lie.tell(request);
    const absl::Status refused = Register(request);
    EXPECT_EQ(refused.code(), lie.code) << lie.name << ": " << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(lie.text)) << lie.name;
  }
  EXPECT_TRUE(session_->Start().ok());
  large->Free();
  elsewhere->Free();
}

TEST_F(CudaRegistration, MemoryThatTheTrainerDoesNotSeeAsTheDaemonDoesIsRefused) {
  Configure("probed");
  EXPECT_EQ(Confirm({"", ""}).code(), absl::StatusCode::kFailedPrecondition);  // nothing to confirm
  ASSERT_TRUE(Register(TrueRequest()).ok());
  const absl::Status twice = Register(TrueRequest());
  EXPECT_EQ(twice.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(twice.message()), HasSubstr("already registered"));
  const absl::Status wrong = Confirm({std::string(16, 'a'), std::string(16, 'b')});
  EXPECT_EQ(wrong.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("do not see the same memory"));
  // Its mapping goes at once, and another try is another registration.
  absl::Status started;
  EXPECT_TRUE(Eventually([&] {
    started = session_->Start();
    return !absl::IsAlreadyExists(started);
  }));
  EXPECT_TRUE(started.ok()) << started;
}

}  // namespace
}  // namespace dmuon::testing
