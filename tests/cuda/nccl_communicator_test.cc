// The contract of DeviceCommunicator, on the stand-in for NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/cuda/loader.h"
#include "server/collective/device_communicator.h"
#include "tests/cuda/device.h"
#include "tests/fakes/fake_cudart.h"

namespace dmuon::server {
namespace {

using cuda::Fake;
using testing::HasSubstr;
using State = DeviceCommunicator::State;

constexpr int64_t kCount = 1000;
constexpr absl::Duration kSoon = absl::Milliseconds(100);

// A slot's device: backend, stream, and private memory for one exchange.
class Slot {
 public:
  explicit Slot(int device) : backend_(*cuda::LoadBackend(device)) {
    stream_ = *backend_->CreateStream();
    from = static_cast<float*>(*backend_->Allocate(kCount * sizeof(float)));
    to = static_cast<float*>(*backend_->Allocate(8 * kCount * sizeof(float)));
  }
  ~Slot() {
    backend_->Free(from);
    backend_->Free(to);
    backend_->DestroyStream(stream_);
  }
  Slot(const Slot&) = delete;

  void Fill(float value) {
    const std::vector<float> host(kCount, value);
    backend_->CopyFromHost(stream_, from, host.data(), kCount * sizeof(float));
  }
  std::vector<float> To(int64_t count = kCount) {
    std::vector<float> host(static_cast<size_t>(count));
    backend_->CopyToHost(stream_, host.data(), to, host.size() * sizeof(float));
    EXPECT_TRUE(backend_->Synchronize(stream_).ok());
    return host;
  }
  kernels::Stream stream() const { return stream_; }
  Exchange Of(Movement movement, int root = 0) const {
    return {.movement = movement, .root = root, .count = kCount, .from = from, .to = to};
  }

  float *from, *to;

 private:
  std::unique_ptr<kernels::Backend> backend_;
  kernels::Stream stream_;
};

class NcclCommunicator : public testing::Test {
 protected:
  static constexpr int kRanks = 3;

  static void SetUpTestSuite() {
    auto loaded = LoadDeviceCommunicators();
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    communicators_ = *loaded;
  }
  void SetUp() override {
    ASSERT_NE(communicators_, nullptr);
    disorder_before_ = AllDisorder();
    for (int r = 0; r < kRanks; ++r) slots_.push_back(std::make_unique<Slot>(r));
  }
  void TearDown() override {
    slots_.clear();
    auto* living = reinterpret_cast<int (*)()>(Symbol("fake_nccl_communicators"));
    EXPECT_EQ(living(), 0);
  }

  static void* Symbol(const char* name) {
    return dlsym(dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD), name);
  }
  static void Script(const std::string& script) {
    Fake<void(const char*)>("fake_cuda_script")(script.c_str());
  }
  static uint64_t Calls(const char* function) {
    return Fake<uint64_t(const char*)>("fake_cuda_calls")(function);
  }
  static FakeCudaCounters Counters() { return Fake<FakeCudaCounters()>("fake_cuda_counters")(); }
  // Lines about order that this test has made.
  size_t Disorder() const { return AllDisorder() - disorder_before_; }
  static size_t AllDisorder() {
    return reinterpret_cast<size_t (*)(char*, size_t)>(Symbol("fake_nccl_disorder"))(nullptr, 0);
  }

  // Options of ranks [first, first + count) of kRanks, on the device of their number.
  static DeviceCommunicatorOptions Options(const std::string& id, int first, int count) {
    DeviceCommunicatorOptions options;
    options.id = id;
    for (int r = 0; r < kRanks; ++r) options.devices.push_back(absl::StrCat("GPU-", r));
    for (int r = first; r < first + count; ++r) options.local.push_back({r, r});
    return options;
  }
  static std::unique_ptr<DeviceCommunicator> Make(const DeviceCommunicatorOptions& options) {
    auto made = communicators_->Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }
  static State Formed(const DeviceCommunicator& c) {
    while (c.state() == State::kForming) std::this_thread::yield();
    return c.state();
  }
  static std::string Id() { return *communicators_->NewId(); }
  // All ranks in one process, ready.
  static std::unique_ptr<DeviceCommunicator> Ready() {
    auto made = Make(Options(Id(), 0, kRanks));
    EXPECT_EQ(Formed(*made), State::kReady) << made->cause();
    return made;
  }
  static absl::Status Wait(const DeviceCommunicator& c, int rank, uint64_t number) {
    while (true) {
      const absl::StatusOr<bool> ended = c.Ended(rank, number);
      if (!ended.ok()) return ended.status();
      if (*ended) return absl::OkStatus();
      std::this_thread::yield();
    }
  }
  // The same exchange of all, to its end.
  void All(DeviceCommunicator& c, Movement movement, int root = 0) {
    for (int r = 0; r < kRanks; ++r)
      ASSERT_TRUE(c.Submit(r, slots_[r]->stream(), slots_[r]->Of(movement, root)).ok());
    for (int r = 0; r < kRanks; ++r) {
      const absl::Status ended = Wait(c, r, ++last_[r]);
      ASSERT_TRUE(ended.ok()) << ended;
    }
  }

  static inline DeviceCommunicators* communicators_ = nullptr;
  size_t disorder_before_ = 0;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::array<uint64_t, kRanks> last_ = {};
};

TEST_F(NcclCommunicator, SumsBroadcastsAndGathersInRankOrder) {
  EXPECT_THAT(communicators_->description(), HasSubstr("NCCL 2."));
  const auto c = Ready();
  for (int r = 0; r < kRanks; ++r) slots_[r]->Fill(static_cast<float>(1 << r));
  All(*c, Movement::kSum);
  for (const auto& slot : slots_) EXPECT_THAT(slot->To(), testing::Each(7.0f));
  All(*c, Movement::kBroadcast, 1);
  for (const auto& slot : slots_) EXPECT_THAT(slot->To(), testing::Each(2.0f));
  All(*c, Movement::kSumTo, 2);
  EXPECT_THAT(slots_[2]->To(), testing::Each(7.0f));
  EXPECT_THAT(slots_[0]->To(), testing::Each(2.0f));  // not written
  All(*c, Movement::kGather, 1);
  const std::vector<float> gathered = slots_[1]->To(kRanks * kCount);
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(gathered[static_cast<size_t>(r * kCount)], 1 << r);
    EXPECT_EQ(gathered[static_cast<size_t>((r + 1) * kCount - 1)], 1 << r);
  }
  for (const auto& slot : slots_) slot->Fill(9);
  for (int r = 0; r < kRanks; ++r) {
    Exchange send = slots_[r]->Of(Movement::kSend, 2);
    send.peer = 0;
    ASSERT_TRUE(c->Submit(r, slots_[r]->stream(), send).ok());
  }
  for (int r = 0; r < kRanks; ++r) ASSERT_TRUE(Wait(*c, r, ++last_[r]).ok());
  EXPECT_THAT(slots_[0]->To(), testing::Each(9.0f));
  EXPECT_THAT(slots_[1]->To(), testing::Each(testing::Ne(9.0f)));
  EXPECT_EQ(Disorder(), 0u);
}

// The copies into `from` have not run when the exchange is submitted.
TEST_F(NcclCommunicator, AnExchangeComesAfterWhatIsOnItsRanksStream) {
  const auto c = Ready();
  for (int round = 1; round <= 10; ++round) {
    for (int r = 0; r < kRanks; ++r) slots_[r]->Fill(static_cast<float>(round + r));
    All(*c, Movement::kSum);
    for (const auto& slot : slots_)
      ASSERT_THAT(slot->To(), testing::Each(static_cast<float>(3 * round + 3)));
  }
}

TEST_F(NcclCommunicator, NothingIsIssuedBeforeAllRanksOfTheProcessHaveSubmitted) {
  const auto c = Ready();
  const uint64_t before = Calls("ncclAllReduce");
  for (int r = 0; r < kRanks - 1; ++r)
    ASSERT_TRUE(c->Submit(r, slots_[r]->stream(), slots_[r]->Of(Movement::kSum)).ok());
  for (int i = 0; i < 1000; ++i) ASSERT_FALSE(*c->Ended(0, 1));
  EXPECT_EQ(Calls("ncclAllReduce"), before);
  ASSERT_TRUE(c->Submit(2, slots_[2]->stream(), slots_[2]->Of(Movement::kSum)).ok());
  EXPECT_TRUE(Wait(*c, 0, 1).ok());
}

TEST_F(NcclCommunicator, ThreadsOfThreeRanksKeepOneOrderAndNothingIsMadeMeanwhile) {
  const auto c = Ready();
  const FakeCudaCounters before = Counters();
  std::vector<std::thread> workers;
  for (int r = 0; r < kRanks; ++r) {
    workers.emplace_back([&, r] {
      Slot& slot = *slots_[r];
      for (int n = 0; n < 50; ++n) {
        const auto number =
            c->Submit(r, slot.stream(), slot.Of(static_cast<Movement>(n % 4), n % kRanks));
        ASSERT_TRUE(number.ok()) << number.status();
        ASSERT_TRUE(Wait(*c, r, *number).ok());
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(Disorder(), 0u);
  EXPECT_EQ(Counters().created, before.created);
  EXPECT_EQ(Counters().allocations, before.allocations);
}

TEST_F(NcclCommunicator, RanksThatDifferAreNamedAndNothingIsIssued) {
  const auto c = Ready();
  const uint64_t before = Calls("ncclAllReduce") + Calls("ncclBroadcast");
  for (int r = 0; r < kRanks; ++r) {
    ASSERT_TRUE(c->Submit(r, slots_[r]->stream(),
                          slots_[r]->Of(r == 1 ? Movement::kBroadcast : Movement::kSum, 2))
                    .ok());
  }
  const absl::Status ended = Wait(*c, 0, 1);
  EXPECT_EQ(ended.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(ended.message()),
              HasSubstr("rank 0 submitted sum of 1000 fp32, root 2; rank 1 submitted broadcast"));
  EXPECT_EQ(Calls("ncclAllReduce") + Calls("ncclBroadcast"), before);
}

TEST_F(NcclCommunicator, MoreThanWasSaidUnderWayIsRefused) {
  DeviceCommunicatorOptions options = Options(Id(), 0, kRanks);
  options.most_under_way = 2;
  const auto c = Make(options);
  ASSERT_EQ(Formed(*c), State::kReady);
  const auto submit = [&] {
    return c->Submit(0, slots_[0]->stream(), slots_[0]->Of(Movement::kSum)).status();
  };
  ASSERT_TRUE(submit().ok());
  ASSERT_TRUE(submit().ok());
  EXPECT_EQ(submit().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(NcclCommunicator, TwoRanksOnOneDeviceAreRefusedByNameBeforeNcclIsAsked) {
  DeviceCommunicatorOptions options = Options(Id(), 0, kRanks);
  options.devices[2] = options.devices[0];
  const uint64_t before = Calls("ncclCommInitRankConfig");
  const auto made = communicators_->Create(options);
  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(made.status().message()), HasSubstr("ranks 0 and 2 are both on GPU-0"));
  EXPECT_EQ(Calls("ncclCommInitRankConfig"), before);
}

TEST_F(NcclCommunicator, ARankThatDoesNotJoinEndsTheWaitAtItsDeadline) {
  DeviceCommunicatorOptions options = Options(Id(), 0, 2);
  options.epoch = 7;
  options.join_timeout = kSoon;
  const auto c = Make(options);
  EXPECT_EQ(Formed(*c), State::kAborted);
  EXPECT_EQ(c->cause().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(c->cause().message()),
              HasSubstr("epoch 7: forming the communicator of 3 ranks (here: 0, 1)"));
}

// Two daemons, which tell each other: ranks 0 and 1 here, 2 there.
class TwoDaemons : public NcclCommunicator {
 protected:
  void Form(absl::Duration exchange_timeout = absl::Seconds(60)) {
    ++epoch_;
    here_.reset();
    there_.reset();
    const std::string id = Id();
    DeviceCommunicatorOptions here = Options(id, 0, 2), there = Options(id, 2, 1);
    here.epoch = there.epoch = epoch_;
    here.exchange_timeout = exchange_timeout;
    here.on_abort = [this](const absl::Status& cause) { there_->Abort(cause); };
    there.on_abort = [this](const absl::Status& cause) { here_->Abort(cause); };
    here_ = Make(here);
    there_ = Make(there);
    ASSERT_EQ(Formed(*here_), State::kReady) << here_->cause();
    ASSERT_EQ(Formed(*there_), State::kReady) << there_->cause();
  }
  void TearDown() override {
    here_.reset();
    there_.reset();
    NcclCommunicator::TearDown();
  }
  DeviceCommunicator& Of(int rank) { return rank < 2 ? *here_ : *there_; }
  void Submit(int rank, Movement movement = Movement::kSum) {
    ASSERT_TRUE(Of(rank).Submit(rank, slots_[rank]->stream(), slots_[rank]->Of(movement)).ok());
  }
  // The cause that each rank gets, all of one kind.
  void ExpectAbortedByAll(absl::StatusCode code, const std::string& text) {
    for (int r = 0; r < kRanks; ++r) {
      const absl::Status ended = Wait(Of(r), r, 1);
      EXPECT_EQ(ended.code(), code) << "rank " << r << ": " << ended;
      EXPECT_THAT(std::string(ended.message()), HasSubstr(text)) << "rank " << r;
      EXPECT_EQ(Of(r).Submit(r, slots_[r]->stream(), slots_[r]->Of(Movement::kSum)).status().code(),
                code);
    }
  }
  void ExpectANewEpochWorks() {
    Form();
    for (int r = 0; r < kRanks; ++r) slots_[r]->Fill(static_cast<float>(1 << r));
    for (int r = 0; r < kRanks; ++r) Submit(r);
    for (int r = 0; r < kRanks; ++r) {
      ASSERT_TRUE(Wait(Of(r), r, 1).ok()) << Of(r).cause();
      EXPECT_THAT(slots_[r]->To(), testing::Each(7.0f));
    }
    EXPECT_EQ(here_->digest(1), there_->digest(2));
  }

  uint64_t epoch_ = 0;
  std::unique_ptr<DeviceCommunicator> here_, there_;
};

TEST_F(TwoDaemons, AHangEndsAtTheDeadlineForAllAndANewEpochWorks) {
  Form(kSoon);
  Script("ncclHang:2=fail(1)");
  for (int r = 0; r < kRanks; ++r) Submit(r);
  ExpectAbortedByAll(absl::StatusCode::kDeadlineExceeded,
                     "exchange 1 (sum of 1000 fp32, root 0) has not ended after 100ms");
  ExpectANewEpochWorks();
}

TEST_F(TwoDaemons, AnAsynchronousErrorEndsTheEpochForAllAndANewOneWorks) {
  Form();
  Script("ncclAsyncError:3=fail(6)");
  for (int r = 0; r < kRanks; ++r) Submit(r);
  ExpectAbortedByAll(absl::StatusCode::kUnavailable, "remote process exited");
  ExpectANewEpochWorks();
}

TEST_F(TwoDaemons, ADaemonThatNeverSubmitsIsEndedByTheOthersDeadline) {
  Form(kSoon);
  Submit(0);
  Submit(1);
  const absl::Status ended = Wait(*here_, 0, 1);
  EXPECT_EQ(ended.code(), absl::StatusCode::kDeadlineExceeded);
  while (there_->state() != State::kAborted) std::this_thread::yield();
  EXPECT_EQ(there_->cause().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(TwoDaemons, AnAbortFromOutsideEndsWhatIsUnderWayWithItsCause) {
  Form();
  Submit(0);
  Submit(1);
  here_->Abort(absl::UnavailableError("the trainer of rank 1 died"));
  ExpectAbortedByAll(absl::StatusCode::kUnavailable, "the trainer of rank 1 died");
  ExpectANewEpochWorks();
}

TEST_F(TwoDaemons, DigestsTellDaemonsThatDifferApart) {
  Form(kSoon);
  EXPECT_EQ(here_->digest(0), there_->digest(2));
  Submit(0);
  Submit(1);
  Submit(2, Movement::kBroadcast);
  EXPECT_EQ(here_->digest(0), here_->digest(1));
  EXPECT_NE(here_->digest(0), there_->digest(2));
}

TEST_F(NcclCommunicator, AnIdOfAnEpochThatWasIsRefused) {
  const std::string id = Id();
  {
    const auto first = Make(Options(id, 0, kRanks));
    ASSERT_EQ(Formed(*first), State::kReady);
  }
  const auto again = Make(Options(id, 0, kRanks));
  EXPECT_EQ(Formed(*again), State::kAborted);
  EXPECT_EQ(again->cause().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(NcclCommunicator, AnAbortThatBlocksIsReportedInTime) {
  DeviceCommunicatorOptions options = Options(Id(), 0, kRanks);
  absl::Notification stuck;
  absl::Status what;
  options.abort_timeout = absl::Milliseconds(50);
  options.on_stuck = [&](const absl::Status& status) {
    what = status;
    stuck.Notify();
  };
  const auto c = Make(options);
  ASSERT_EQ(Formed(*c), State::kReady);
  Script("ncclCommAbort:1=block(400ms)");
  c->Abort(absl::AbortedError("for the test"));
  EXPECT_TRUE(stuck.WaitForNotificationWithTimeout(absl::Seconds(30)));
  EXPECT_THAT(std::string(what.message()), HasSubstr("ncclCommAbort has not returned after 50ms"));
}

TEST_F(NcclCommunicator, AProcessWhoseAbortNeverReturnsEndsWith70) {
  EXPECT_EXIT(
      {
        DeviceCommunicatorOptions options = Options(Id(), 0, kRanks);
        options.abort_timeout = absl::Milliseconds(50);
        const auto c = Make(options);
        (void)Formed(*c);
        Script("ncclCommAbort:1=block");
        c->Abort(absl::AbortedError("for the test"));
        while (true) std::this_thread::yield();
      },
      testing::ExitedWithCode(70), "communicator_stuck");
}

// Each call of the library, failing once: a cause that names NCCL, nothing left behind, and a new epoch.
TEST_F(TwoDaemons, AFailureOfAnyCallIsAnErrorWithAName) {
  for (const char* function :
       {"ncclGroupStart", "ncclGroupEnd", "ncclCommInitRankConfig", "ncclCommGetAsyncError",
        "ncclAllReduce", "cudaStreamWaitEvent", "cudaEventQuery", "cudaStreamCreateWithPriority",
        "cudaEventCreateWithFlags"}) {
    SCOPED_TRACE(function);
    const FakeCudaCounters before = Counters();
    const bool cuda = std::string(function).compare(0, 4, "cuda") == 0;
    {
      Script(absl::StrCat(function, ":1=fail(", cuda ? 2 : 3, ")"));
      const auto c = Make(Options(Id(), 0, kRanks));
      absl::Status ended;
      if (Formed(*c) == State::kReady) {
        for (int r = 0; r < kRanks; ++r)
          (void)c->Submit(r, slots_[r]->stream(), slots_[r]->Of(Movement::kSum));
        ended = Wait(*c, 0, 1);
      } else {
        ended = c->cause();
      }
      EXPECT_FALSE(ended.ok());
      EXPECT_THAT(std::string(ended.message()), HasSubstr(cuda ? "cudaError" : "NCCL: internal"));
    }
    EXPECT_EQ(Counters().streams, before.streams);
    EXPECT_EQ(Counters().events, before.events);
  }
  ExpectANewEpochWorks();
}

}  // namespace
}  // namespace dmuon::server

int main(int argc, char** argv) {
  setenv("DMUON_FAKE_CUDA_DEVICES", "3", 1);
  testing::InitGoogleTest(&argc, argv);
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  return RUN_ALL_TESTS();
}
