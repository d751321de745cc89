// What a session on GPUs holds is what its plan says: the daemon's tables run here on the stand-ins, which count the bytes.
// Devices 0 and 1 can read each other's memory; 2 and 3 nobody else's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "base/status_macros.h"
#include "client/cuda_runtime.h"
#include "server/session/session_table.h"
#include "tests/cuda/device.h"
#include "tests/support/environment.h"

namespace dmuon::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kDevices = 4;
constexpr int kPageLocked = -1;

struct Case {
  const char* name;
  std::vector<Parameter> parameters;
  std::vector<int> devices;  // of each rank
  bool z3 = false;
  bool deterministic = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Block> Blocks(int count, int64_t rows) {
  std::vector<Block> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back({i * rows, (i + 1) * rows});
  return blocks;
}

Parameter Matrix(std::string name, int64_t rows, int64_t cols, int boundary = 0,
                 std::vector<Block> blocks = {}) {
  return {std::move(name), {rows, cols}, Route::kMuon, BoundaryId(boundary), std::move(blocks)};
}
Parameter Vector(std::string name, int64_t count, int boundary = 0) {
  return {std::move(name), {count}, Route::kAdamw, BoundaryId(boundary), {}};
}

OpenSpec SpecOf(const std::string& job, const Case& c) {
  OpenSpec spec;
  spec.job = job;
  spec.mesh.shard = static_cast<int>(c.devices.size());
  spec.reshard_after_forward = c.z3;
  spec.table.parameters = c.parameters;
  const int boundaries = c.parameters.back().boundary.value() + 1;
  for (int b = 0; b < boundaries; ++b)
    spec.table.boundaries.push_back({"layers." + std::to_string(b), false});
  return spec;
}

OptimizerSpec OptimizerOf(const Case& c) {
  OptimizerSpec spec;
  spec.groups = {{"muon", Route::kMuon}, {"adamw", Route::kAdamw}};
  for (const Parameter& p : c.parameters)
    spec.parameters.push_back({Dtype::kBF16, Dtype::kBF16, p.route == Route::kMuon ? 0 : 1});
  spec.newton_schulz.deterministic = c.deterministic;
  return spec;
}

using Bytes = std::array<FakeCudaBytes, 1 + kDevices>;  // of page-locked memory first

class SessionMemory : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto backend = kernels::CreateBackend("cuda", 1);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    bytes_ = cuda::Fake<FakeCudaBytes(int)>("fake_cuda_bytes");
    forget_most_ = cuda::Fake<void()>("fake_cuda_forget_most");
    counters_ = cuda::Fake<FakeCudaCounters()>("fake_cuda_counters");
    ASSERT_TRUE(bytes_ != nullptr && forget_most_ != nullptr && counters_ != nullptr);
    table_ = std::make_unique<SessionTable>(*backend_,
                                            SessionLimits{.formation_timeout = absl::Seconds(20)});
    const auto runtime = client::CudaRuntime::Load();
    ASSERT_TRUE(runtime.ok()) << runtime.status();
    for (int d = 0; d < kDevices; ++d) {
      names_.push_back(*(*runtime)->NameOf(d));
      ASSERT_TRUE(backend_->OnDevice(names_.back()).ok());
    }
  }
  void TearDown() override {
    table_.reset();
    for (const FakeCudaBytes& bytes : Now()) EXPECT_EQ(bytes.live, 0u) << "left over";
  }

  Bytes Now() const {
    Bytes now;
    for (int d = kPageLocked; d < kDevices; ++d) now[1 + d] = bytes_(d);
    return now;
  }
  static Trainer TrainerOf(const std::string& job, int rank) {
    const uint64_t attachment = 1 + 100 * (job.front() - 'a') + rank;
    return {AttachmentId(attachment), 1000, static_cast<pid_t>(attachment)};
  }
  // Opens and configures every rank: all that the daemon takes is taken then. What rank 0 was told.
  absl::Status Configure(const std::string& job, const Case& c) {
    std::vector<absl::Status> status(c.devices.size());
    std::vector<std::thread> ranks;
    for (int r = 0; r < static_cast<int>(status.size()); ++r) {
      ranks.emplace_back([&, r] {
        status[r] = [&]() -> absl::Status {
          OpenSpec spec = SpecOf(job, c);
          spec.rank = r;
          ASSIGN_OR_RETURN(const Opened opened, table_->Open(TrainerOf(job, r), spec));
          if (r == 0) opened_ = opened.id;
          OptimizerSpec optimizer = OptimizerOf(c);
          optimizer.device = names_[c.devices[r]];
          return table_->Configure(TrainerOf(job, r), opened.id, r, std::move(optimizer)).status();
        }();
      });
    }
    for (std::thread& rank : ranks) rank.join();
    return status[0];
  }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<SessionTable> table_;
  std::vector<std::string> names_;
  SessionId opened_;
  FakeCudaBytes (*bytes_)(int) = nullptr;
  void (*forget_most_)() = nullptr;
  FakeCudaCounters (*counters_)() = nullptr;
};

TEST_P(SessionMemory, HeldOnEachDeviceAndPageLockedIsWhatThePlanSays) {
  const Case& c = GetParam();
  for (const FakeCudaBytes& bytes : Now()) EXPECT_EQ(bytes.live, 0u) << "without a session";
  forget_most_();
  ASSERT_TRUE(Configure("a", c).ok());
  const auto described = table_->Describe("a");
  ASSERT_TRUE(described.ok() && described->memory.size() == c.devices.size());
  std::array<uint64_t, 1 + kDevices> held = {}, planning = {};
  for (size_t s = 0; s < c.devices.size(); ++s) {
    const SlotMemory& m = described->memory[s];
    const size_t device = 1 + static_cast<size_t>(c.devices[s]);
    held[device] += m.state_bytes + m.workspace_bytes + m.staging_bytes;
    planning[device] = std::max(planning[device], m.planning_bytes);
    held[0] += m.page_locked_bytes;
    const auto page = table_->Arena(TrainerOf("a", static_cast<int>(s)), opened_,
                                    static_cast<int>(s), wire::ArenaKind::kControl);
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_EQ(m.control_bytes, page->bytes);
    EXPECT_GT(m.page_locked_bytes, 0u);
    EXPECT_EQ(m.grad_bytes % (2 << 20), 0u);
  }
  const Bytes now = Now();
  for (int d = kPageLocked; d < kDevices; ++d) {
    EXPECT_EQ(now[1 + d].live, held[1 + d]) << "device " << d;
    EXPECT_EQ(now[1 + d].most, std::max(held[1 + d], planning[1 + d])) << "device " << d;
  }
}

std::vector<Case> Cases() {
  const std::vector<Parameter> layers = {Matrix("w0", 96, 160), Vector("b0", 160),
                                         Matrix("w1", 160, 96, 1), Vector("b1", 96, 1)};
  return {
      {"heads", {Matrix("heads", 8 * 64, 200, 0, Blocks(8, 64)), Vector("b", 77)}, {0}},
      {"experts", {Matrix("experts", 131 * 16, 40, 0, Blocks(131, 16))}, {0}},
      {"unequal_parts", {Matrix("fused", 300, 100, 0, {{0, 64}, {64, 128}, {128, 300}})}, {0}},
      {"square", {Matrix("w", 128, 128)}, {0}},
      {"cut_into_parts", {Matrix("w", 600, 1300)}, {0}},
      {"deterministic", {Matrix("w", 600, 1300)}, {0}, false, true},
      {"resharded", layers, {0, 1}, true},
      {"adamw_alone", {Vector("b", 1000)}, {0}},
      {"a_slot_that_owns_nothing", {Matrix("w", 64, 100)}, {0, 1}},
      {"two_slots_on_a_device", layers, {1, 1}},
      {"devices_that_read_each_other", layers, {0, 1}},
      {"devices_apart", layers, {2, 3}},
      {"devices_apart_resharded", layers, {2, 3}, true},
  };
}
INSTANTIATE_TEST_SUITE_P(Of, SessionMemory, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Of a device where another session is.
using SessionTooBig = SessionMemory;

TEST_P(SessionTooBig, IsRefusedWithTheNumbersBeforeAnythingIsAllocated) {
  ASSERT_TRUE(Configure("a", {"", {Matrix("w", 64, 100)}, {0}}).ok());
  const SessionId first = opened_;
  const std::vector<float> weight(64 * 100, 3);
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(weight.data()),
                                          weight.size() * sizeof(float));
  ASSERT_TRUE(table_->WriteState(TrainerOf("a", 0), first, "w", StateKind::kWeight, bytes).ok());

  const Bytes before = Now();
  forget_most_();
  const uint64_t allocations = counters_().allocations;
  const absl::Status refused = Configure("b", GetParam());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  const uint64_t free = *backend_->available_bytes();
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("needs "), HasSubstr(" bytes"), HasSubstr(names_[0]),
                    HasSubstr("has " + std::to_string(free) + " available")));
  EXPECT_EQ(counters_().allocations, allocations);
  for (int d = kPageLocked; d < kDevices; ++d) EXPECT_EQ(Now()[1 + d].most, before[1 + d].live);

  const auto read = table_->ReadState(TrainerOf("a", 0), first, "w", StateKind::kWeight);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(absl::MakeConstSpan(*read), bytes);
}
INSTANTIATE_TEST_SUITE_P(Of, SessionTooBig,
                         ::testing::Values(Case{"one_matrix", {Matrix("w", 8192, 16384)}, {0}},
                                           Case{"one_that_is_measured_in_more_than_it_takes",
                                                {Matrix("w", 1, 3000000)},
                                                {0}},
                                           Case{
                                               "two_slots_that_fit_alone",
                                               {Matrix("w0", 4096, 8192), Matrix("w1", 4096, 8192)},
                                               {0, 0}}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace dmuon::server
