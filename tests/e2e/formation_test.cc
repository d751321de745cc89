// Sessions that must not come to be, and why.
#include <unistd.h>

#include <cstdint>
#include <functional>

#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class Formation : public E2eTest {
 protected:
  using E2eTest::E2eTest;
  // Opens the session on each rank with its own table; what each was told.
  std::vector<absl::Status> OpenAll(const std::vector<client::OpenOptions>& tables) {
    return OnRanks(static_cast<int>(tables.size()), [&](int rank) -> absl::Status {
      auto connection = client::Connection::Open(endpoint());
      if (!connection.ok()) return connection.status();
      return (*connection)->OpenSession(tables[static_cast<size_t>(rank)]).status();
    });
  }
};

TEST_F(Formation, TablesThatDifferNameTheFirstDifferenceAndBothSides) {
  const JobOptions job{.job = "differ", .world = 2};
  client::OpenOptions other = SmallTable(job, 1);
  other.parameters[2].shape = {8, 25};
  for (const absl::Status& status : OpenAll({SmallTable(job, 0), other})) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("layers.1.weight"), HasSubstr("8 x 24"), HasSubstr("8 x 25"),
                      HasSubstr("rank")));
  }
}

TEST_F(Formation, APredicateThatMatchedOnSomeRanksOnlyIsAnErrorAndNotAWait) {
  const JobOptions job{.job = "some", .world = 2};
  client::OpenOptions fewer = SmallTable(job, 1);
  fewer.parameters.pop_back();
  for (const absl::Status& status : OpenAll({SmallTable(job, 0), fewer})) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

TEST_F(Formation, MeshesThatDifferAreRefused) {
  client::OpenOptions a = SmallTable({.job = "mesh", .world = 2}, 0), b = a;
  b.rank = 1;
  b.mesh = {.replicate = 2, .shard = 1};
  for (const absl::Status& status : OpenAll({a, b})) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("mesh"));
  }
}

TEST_F(Formation, ARankThatNeverComesEndsTheWaitAndIsNamed) {
  JobOptions job{.job = "missing", .world = 3, .formation_timeout = absl::Milliseconds(300)};
  const auto results = OpenAll({SmallTable(job, 0), SmallTable(job, 1)});  // and never rank 2
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank(s) 2 "), HasSubstr("300ms")));
  }
}

TEST_F(Formation, ARankThatIsThereAlreadyIsRefusedAndTheOthersGoOn) {
  const JobOptions job{.job = "twice"};
  auto ranks = StartAll(endpoint(), job);
  auto connection = client::Connection::Open(endpoint());
  ASSERT_TRUE(connection.ok());
  const absl::Status second = (*connection)->OpenSession(SmallTable(job, 0)).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kAlreadyExists) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr(std::to_string(getpid())));
  EXPECT_TRUE(TrainAll(ranks, 2).ok());
}

TEST_F(Formation, AOneDimensionalParameterOnMuonIsRefusedByName) {
  client::OpenOptions table = SmallTable({.job = "vector"}, 0);
  table.parameters[1].route = client::Route::kMuon;
  const absl::Status status = OpenAll({table})[0];
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("layers.0.bias"), HasSubstr("muon")));
}

TEST_F(Formation, OddTablesAreRefusedByName) {
  const auto refused = [&](const std::function<void(client::OpenOptions&)>& spoil) {
    client::OpenOptions table = SmallTable({.job = "odd"}, 0);
    spoil(table);
    const absl::Status status = OpenAll({table})[0];
    EXPECT_THAT(status.code(),
                AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kResourceExhausted))
        << status;
    return std::string(status.message());
  };
  using Table = client::OpenOptions;
  EXPECT_THAT(refused([](Table& t) { t.job = ""; }), HasSubstr("job"));
  EXPECT_THAT(refused([](Table& t) { t.job = std::string(300, 'x'); }), HasSubstr("job"));
  EXPECT_THAT(refused([](Table& t) { t.rank = 1; }), HasSubstr("rank"));
  EXPECT_THAT(refused([](Table& t) { t.parameters[1].name = t.parameters[0].name; }),
              HasSubstr("layers.0.weight"));
  EXPECT_THAT(refused([](Table& t) { t.parameters[3].name = ""; }), HasSubstr("name"));
  EXPECT_THAT(refused([](Table& t) {
                t.parameters[0].shape = {0, 4};
              }),
              HasSubstr("layers.0.weight"));
  EXPECT_THAT(refused([](Table& t) { t.parameters[0].shape.assign(9, 2); }),
              HasSubstr("layers.0.weight"));
  EXPECT_THAT(refused([](Table& t) {
                t.parameters[0].shape = {INT64_MAX, INT64_MAX};
              }),
              HasSubstr("layers.0.weight"));
  EXPECT_THAT(refused([](Table& t) { t.parameters[0].boundary = 2; }), HasSubstr("boundary"));
  EXPECT_THAT(refused([](Table& t) {
                t.parameters[0].blocks = {{0, 10}, {12, 24}};
              }),
              HasSubstr("layers.0.weight"));
  EXPECT_THAT(refused([](Table& t) { t.mesh.shard = 0; }), HasSubstr("mesh"));
  EXPECT_THAT(refused([](Table& t) { t.parameters.clear(); }), HasSubstr("parameters"));
}

TEST_F(Formation, WhatIsNotBuiltYetSaysSo) {
  client::OpenOptions table = SmallTable({.job = "later"}, 0);
  table.mesh = {.replicate = 1, .shard = 1, .tp = 2};
  EXPECT_EQ(OpenAll({table})[0].code(), absl::StatusCode::kUnimplemented);
  table = SmallTable({.job = "later"}, 0);
  table.parameters[1].route = client::Route::kShardedAdamw;
  EXPECT_EQ(OpenAll({table})[0].code(), absl::StatusCode::kUnimplemented);
  table = SmallTable({.job = "later"}, 0);
  table.coordinator = "node7:7070";
  EXPECT_EQ(OpenAll({table})[0].code(), absl::StatusCode::kUnimplemented);
}

TEST_F(Formation, OptimizersThatDifferAreRefusedOnAllRanks) {
  const JobOptions job{.job = "groups", .world = 2};
  const auto results = OnRanks(2, [&](int rank) -> absl::Status {
    client::OptimizerOptions optimizer = SmallOptimizer();
    if (rank == 1) optimizer.groups[0].name = "others";
    return Trainer::Start(endpoint(), SmallTable(job, rank), optimizer).status();
  });
  for (const absl::Status& status : results) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("groups"), HasSubstr("rank")));
  }
}

TEST_F(Formation, AGroupOfAnotherRouteIsRefusedByParameter) {
  client::OptimizerOptions optimizer = SmallOptimizer();
  optimizer.parameters[1].group = kMuonGroup;
  const absl::Status status =
      Trainer::Start(endpoint(), SmallTable({.job = "route"}, 0), optimizer).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("layers.0.bias"));
}

TEST_F(Formation, CoefficientsThatDivergeAreRefused) {
  client::OptimizerOptions optimizer = SmallOptimizer();
  optimizer.newton_schulz.coefficients = {{40, -80, 50}};
  const absl::Status status =
      Trainer::Start(endpoint(), SmallTable({.job = "diverge"}, 0), optimizer).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

class TooBig : public Formation {
 protected:
  TooBig()
      : Formation(
            Options{.daemon_flags = {"--max-session-bytes", "10000000", "--max-sessions", "2"}}) {}
};

TEST_F(TooBig, ASessionOverTheLimitNamesTheBytesNeededAndThere) {
  client::OpenOptions table = SmallTable({.job = "big"}, 0);
  table.parameters[0].shape = {1024, 1024};
  const absl::Status status = Trainer::Start(endpoint(), table, SmallOptimizer()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("10000000"), HasSubstr("bytes")));
}

TEST_F(TooBig, ASessionTooManyNamesTheLimit) {
  auto second = StartAll(endpoint(), {.job = "second"});
  const absl::Status third = OpenAll({SmallTable({.job = "third"}, 0)})[0];
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted) << third;
  EXPECT_THAT(std::string(third.message()), HasSubstr("max_sessions"));
}

class OtherUser : public Formation {
 protected:
  OtherUser() : Formation(Options{.shared = true}) {}
  static constexpr uid_t kOther = 12345;
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can run a trainer as another user";
    Formation::SetUp();
  }
};

TEST_F(OtherUser, ASecondJobOfTheSameNameIsDeniedAndTheFirstGoesOn) {
  auto mine = StartAll(endpoint(), {.job = "shared-name"});
  ChildProcess other = Helper("once", {.job = "shared-name"}, 0, {.uid = kOther});
  EXPECT_THAT(other.ReadAll(),
              AllOf(HasSubstr("error PERMISSION_DENIED"), HasSubstr("another user")));
  EXPECT_EQ(other.Wait(), 1);
  EXPECT_TRUE(TrainAll(mine, 2).ok());
}

TEST_F(OtherUser, AJobOfItsOwnNameTrains) {
  ChildProcess other = Helper("once", {.job = "their-own"}, 0, {.uid = kOther});
  EXPECT_THAT(other.ReadAll(), HasSubstr("closed"));
  EXPECT_EQ(other.Wait(), 0);
}

TEST_F(OtherUser, TheUserThatNobodyCanNameIsDenied) {
  ChildProcess nobody = Helper("attach", {.job = "nobodys"}, 0, {.uid = 65534});
  EXPECT_THAT(nobody.ReadAll(), HasSubstr("error PERMISSION_DENIED"));
  EXPECT_EQ(nobody.Wait(), 1);
}

TEST_F(OtherUser, SocketsThatAreClosedToAUserSaySo) {
  DaemonProcess closed(Program("dmuond"));
  ChildProcess other({HelperProgram(), "attach", closed.endpoint(), "job", "1", "0"},
                     {.uid = kOther});
  EXPECT_THAT(other.ReadAll(),
              AllOf(HasSubstr("error PERMISSION_DENIED"), HasSubstr("as uid 12345")));
}

}  // namespace
}  // namespace dmuon::testing
