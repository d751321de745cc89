// Records written by hand into the ring, each with one field wrong. The trainer is authenticated, not trusted: its own
// session ends with a reason on all its ranks, and nobody else notices.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "client/session_impl.h"
#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using wire::Record;
using wire::RecordType;

struct WrongField {
  const char* name;
  const char* reason;  // part of what the ranks are told
  std::function<void(Record&)> spoil;
  bool z3 = false;
};

// A READY record of boundary 0, spoilt.
std::vector<WrongField> WrongFields() {
  const auto as = [](
                      RecordType type, std::function<void(Record&)> more = [](Record&) {}) {
    return [type, more](Record& r) {
      r.type = type;
      more(r);
    };
  };
  return {
      {"TypeUnspecified", "type", as(RecordType::kUnspecified)},
      {"TypeUnknown", "type", as(static_cast<RecordType>(0xffffffff))},
      {"Digest", "digest", [](Record& r) { ++r.table_digest; }},
      {"Epoch", "epoch", [](Record& r) { ++r.epoch; }},
      {"BoundaryJustOut", "boundary", [](Record& r) { r.boundary = 2; }},
      {"BoundaryHuge", "boundary", [](Record& r) { r.boundary = 0xffffffff; }},
      {"GenerationPast", "generation", [](Record& r) { r.generation = 0; }},
      {"GenerationFuture", "generation", [](Record& r) { r.generation += 1; }},
      {"GenerationHuge", "generation",
       [](Record& r) { r.generation = std::numeric_limits<uint64_t>::max(); }},
      {"MicroSkipped", "micro", [](Record& r) { r.micro = 1; }},
      {"MicroHuge", "micro", [](Record& r) { r.micro = 0xffffffff; }},
      {"StepGeneration", "generation", as(RecordType::kStep, [](Record& r) { r.generation += 5; })},
      {"StepMaxNormNan", "max_norm",
       as(RecordType::kStep,
          [](Record& r) {
            r.step = 1;
            r.max_norm = std::nan("");
          })},
      {"StepMaxNormNegative", "max_norm",
       as(RecordType::kStep,
          [](Record& r) {
            r.step = 1;
            r.max_norm = -1;
          })},
      {"StepFlagsUnknown", "flags",
       as(RecordType::kStep,
          [](Record& r) {
            r.step = 1;
            r.flags = 0x80000000;
          })},
      {"DiscardGeneration", "generation",
       as(RecordType::kDiscard, [](Record& r) { r.generation = 9; })},
      {"MaterializeInZ2", "MATERIALIZE", as(RecordType::kMaterialize)},
      {"ReleaseInZ2", "RELEASE", as(RecordType::kRelease)},
      {"MaterializeBoundary", "boundary",
       as(RecordType::kMaterialize, [](Record& r) { r.boundary = 2; }), true},
      {"ReleaseBoundary", "boundary", as(RecordType::kRelease, [](Record& r) { r.boundary = 99; }),
       true},
      {"PrepareIsNotBuilt", "PREPARE", as(RecordType::kPrepare)},
  };
}

class Records : public E2eTest, public ::testing::WithParamInterface<WrongField> {
 protected:
  Records() : E2eTest(Options{.daemon_flags = {"--step-timeout-seconds", "2"}}) {}
  // An honest rank is told by the page or by the verdict, whichever comes first: the session is lost, and who did it.
  static void ExpectLost(const absl::Status& status) {
    EXPECT_THAT(status.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted))
        << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0"));
  }
  static Record ReadyRecord(client::Session::Impl& s) {
    Record record;
    record.type = RecordType::kGradsReady;
    record.generation = s.generation;
    record.epoch = s.page.header().epoch;
    record.table_digest = s.table_digest;
    return record;
  }
  // Both ranks step; what they are told.
  static std::vector<absl::Status> StepBoth(std::vector<std::unique_ptr<Trainer>>& ranks) {
    return OnRanks(2, [&](int r) { return ranks[static_cast<size_t>(r)]->Step().status(); });
  }
};

TEST_P(Records, AWrongFieldEndsTheSessionWithItsName) {
  auto ranks = StartAll(endpoint(), {.job = "hostile", .world = 2, .z3 = GetParam().z3});
  client::Session::Impl& hostile = ranks[0]->session().impl();
  Record record = ReadyRecord(hostile);
  GetParam().spoil(record);
  ASSERT_TRUE(hostile.page.Push(record));
  for (const absl::Status& status : StepBoth(ranks)) {
    ExpectLost(status);
    EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().reason));
  }
  ranks.clear();
  auto again = StartAll(endpoint(), {.job = "hostile", .world = 2});  // the name is free
  EXPECT_TRUE(TrainAll(again, 1).ok());
}

INSTANTIATE_TEST_SUITE_P(EachField, Records, ::testing::ValuesIn(WrongFields()),
                         [](const auto& info) { return std::string(info.param.name); });

class Ring : public Records {};

TEST_F(Ring, ATailThatIsImpossibleEndsTheSession) {
  auto ranks = StartAll(endpoint(), {.job = "tail", .world = 2});
  const wire::ControlPage& page = ranks[0]->session().impl().page;
  page.header().ring_tail = page.header().ring_head + page.layout().ring_capacity + 1;
  page.RingDaemon();
  ExpectLost(ranks[1]->Step().status());
}

TEST_F(Ring, GradientsBehindAnOpenStepEndTheSession) {
  auto ranks = StartAll(endpoint(), {.job = "behind", .world = 2});
  client::Session::Impl& hostile = ranks[0]->session().impl();
  ranks[0]->session().SetHyper(kMuonGroup, kMuonHyper);
  ranks[0]->session().SetHyper(kAdamwGroup, kAdamwHyper);
  Record step = ReadyRecord(hostile);
  step.type = RecordType::kStep;
  step.step = 1;
  step.micro = 1;
  ASSERT_TRUE(hostile.page.Push(step));
  ASSERT_TRUE(hostile.page.Push(ReadyRecord(hostile)));
  const absl::Status told = ranks[1]->Train(2);  // the first one was complete
  ExpectLost(told);
}

TEST_F(Ring, AHeaderThatIsScribbledOverHarmsOnlyItsOwner) {
  auto ranks = StartAll(endpoint(), {.job = "scribble", .world = 2});
  const wire::ControlPage& page = ranks[0]->session().impl().page;
  memset(static_cast<void*>(&page.header()), 0xff, sizeof(wire::PageHeader));
  page.RingDaemon();
  const absl::Status told = ranks[1]->Step().status();  // at the latest by the step's time-out
  EXPECT_THAT(told.code(), AnyOf(absl::StatusCode::kUnavailable, absl::StatusCode::kAborted,
                                 absl::StatusCode::kDeadlineExceeded))
      << told;
}

TEST_F(Ring, GroupValuesOfNoSenseAreRefusedByTheStep) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), -1.0}) {
    auto ranks = StartAll(endpoint(), {.job = "values", .world = 2});
    for (auto& rank : ranks) {
      ASSERT_TRUE(rank->Backward().ok());
      rank->session().SetHyper(kMuonGroup, {.lr = bad});
      rank->session().SetHyper(kAdamwGroup, kAdamwHyper);
    }
    const auto results = OnRanks(
        2, [&](int r) { return ranks[static_cast<size_t>(r)]->session().Step({}).status(); });
    for (const absl::Status& status : results) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status << " for lr " << bad;
    }
    EXPECT_TRUE(TrainAll(ranks, 1).ok()) << "nothing was changed, and the step can be tried again";
  }
}

TEST_F(Ring, AStepIdOutOfOrderIsRefusedAndTheSessionGoesOn) {
  auto ranks = StartAll(endpoint(), {.job = "order", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 2).ok());
  for (uint64_t wrong :
       {uint64_t{4}, uint64_t{1}, uint64_t{0}, std::numeric_limits<uint64_t>::max()}) {
    for (auto& rank : ranks)
      rank->session().impl().step = wrong - 1;  // the coming STEP record says `wrong`
    for (const absl::Status& status : StepBoth(ranks)) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("expected 3"));
    }
  }
  for (auto& rank : ranks) rank->session().impl().step = 2;
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
}

TEST_F(Ring, TheSameStepTwiceGivesTheSameAnswerAndOneUpdate) {
  auto ranks = StartAll(endpoint(), {.job = "same", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 2).ok());
  const auto before = ranks[0]->Read("layers.0.weight", client::StateKind::kWeight);
  for (auto& rank : ranks) rank->session().impl().step = 1;
  const auto results = OnRanks(2, [&](int r) { return ranks[static_cast<size_t>(r)]->Step(); });
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(result->applied);
    EXPECT_EQ(result->step, 2u);
  }
  EXPECT_EQ(*ranks[0]->Read("layers.0.weight", client::StateKind::kWeight), *before);
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

}  // namespace
}  // namespace dmuon::testing
