// dmuonctl against a daemon: what it shows, and its exit codes.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/e2e/e2e_test_base.h"

namespace dmuon::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Ctl : public E2eTest {
 protected:
  using E2eTest::E2eTest;
  ChildProcess Run(std::vector<std::string> arguments, const SpawnOptions& options = {}) {
    arguments.insert(arguments.begin(), {Program("dmuonctl"), "--endpoint", endpoint()});
    return ChildProcess(arguments, options);
  }
  // Its stdout, and its exit code is 0.
  std::string Output(const std::vector<std::string>& arguments) {
    ChildProcess ctl = Run(arguments);
    std::string text = ctl.ReadAll();
    EXPECT_EQ(ctl.Wait(), 0);
    return text;
  }
  int Code(const std::vector<std::string>& arguments) {
    ChildProcess ctl = Run(arguments, {.stderr_path = "/dev/null"});
    ctl.ReadAll();
    return ctl.Wait();
  }
  // Its stderr, and its exit code is `code`.
  std::string Words(const std::vector<std::string>& arguments, int code) {
    const std::string log = daemon().directory() + "/ctl-words";
    std::filesystem::remove(log);  // a child adds to it
    ChildProcess ctl = Run(arguments, {.stderr_path = log});
    ctl.ReadAll();
    EXPECT_EQ(ctl.Wait(), code);
    return ChildProcess({"/bin/cat", log}).ReadAll();
  }
};

TEST_F(Ctl, ShowsTheDaemonItsSessionsAndWhoOwnsWhat) {
  auto ranks = StartAll(endpoint(), {.job = "shown", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 3).ok());
  const json status = json::parse(Output({"status", "-o", "json"}));
  EXPECT_EQ(status["pid"], daemon().pid());
  EXPECT_EQ(status["sessions"], 2);
  EXPECT_EQ(status["draining"], false);

  const json sessions = json::parse(Output({"-o", "json", "sessions"}));
  ASSERT_EQ(sessions["sessions"].size(), 2u);
  EXPECT_THAT(Output({"sessions"}),
              AllOf(HasSubstr("NAME"), HasSubstr("shown"), HasSubstr("bystander")));

  const json session = json::parse(Output({"session", "shown", "-o", "json"}));
  EXPECT_EQ(session["world_size"], 2);
  EXPECT_EQ(session["attached"], 2);
  EXPECT_EQ(session["step"], 3);
  ASSERT_EQ(session["placement"].size(), 4u);
  for (size_t p = 0; p < 4; ++p) {
    EXPECT_EQ(session["placement"][p]["owner"],
              ranks[0]->session().placement().parameters[p].owner);
  }
  EXPECT_EQ(session["placement"][0]["shape"], json({24, 16}));
  EXPECT_EQ(session["placement"][0]["bytes"], 24 * 16 * 4);
  EXPECT_EQ(session["placement"][1]["route"], "adamw");
  ASSERT_EQ(session["slots"].size(), 2u);
  double most = 0, sum = 0;
  for (const json& slot : session["slots"]) {
    most = std::max(most, slot["load"].get<double>());
    sum += slot["load"].get<double>();
    EXPECT_GT(slot["state_bytes"].get<uint64_t>(), 0u);
    EXPECT_EQ(slot["alive"], true);
  }
  EXPECT_NEAR(session["imbalance"].get<double>(), most / (sum / 2), 1e-9);
  EXPECT_THAT(Output({"session", "shown"}),
              AllOf(HasSubstr("imbalance"), HasSubstr("24 x 16"), HasSubstr("FLOP")));
  EXPECT_THAT(Output({"session", "shown", "-o", "yaml"}), HasSubstr("shape: [24, 16]"));
}

TEST_F(Ctl, StepsShowsTheLastOnesWithTheirCost) {
  auto ranks = StartAll(endpoint(), {.job = "stepped"});
  ASSERT_TRUE(TrainAll(ranks, 5).ok());
  ASSERT_TRUE(ranks[0]->session().WaitAllWeights().ok());
  const json steps =
      json::parse(Output({"steps", "stepped", "--last", "3", "-o", "json"}))["steps"];
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0]["step"], 3);
  EXPECT_EQ(steps[2]["step"], 5);
  EXPECT_EQ(steps[2]["outcome"], "applied");
  EXPECT_GT(steps[2]["total_seconds"].get<double>(), 0);
  EXPECT_THAT(Output({"steps", "stepped"}), AllOf(HasSubstr("STEP"), HasSubstr("applied")));
}

TEST_F(Ctl, StepShowsWhatEachBlockDidInIt) {
  auto ranks = StartAll(endpoint(), {.job = "detailed", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 3).ok());
  for (auto& rank : ranks) ASSERT_TRUE(rank->session().WaitAllWeights().ok());
  const json step = json::parse(Output({"step", "detailed", "2", "-o", "json"}));
  EXPECT_EQ(step["session"], "detailed");
  EXPECT_EQ(step["step"], 2);
  size_t muon = 0;
  for (const client::Parameter& p : ranks[0]->parameters()) muon += p.route == client::Route::kMuon;
  ASSERT_EQ(step["blocks"].size(), muon);
  for (const json& block : step["blocks"]) {
    EXPECT_NEAR(block["update_rms"].get<double>(), 0.2, 0.06) << block;
    EXPECT_LT(block["orthogonality_error"].get<double>(), 0.6) << block;
    EXPECT_GT(block["norm"].get<double>(), 0) << block;
    EXPECT_THAT(block["kernel"].get<std::string>(), HasSubstr(block["form"].get<std::string>()));
  }
  EXPECT_EQ(json::parse(Output({"step", "detailed", "-o", "json"}))["step"], 3);  // the last one
  EXPECT_THAT(Output({"step", "detailed"}),
              AllOf(HasSubstr("ORTHOGONALITY ERROR"), HasSubstr("layers.0.weight")));
  EXPECT_THAT(Output({"step", "detailed", "-o", "yaml"}), HasSubstr("update_rms: 0."));
  EXPECT_EQ(Code({"step", "detailed", "99"}), 8);
}

TEST_F(Ctl, WatchFollowsStepsAndCtrlCEndsItWith130) {
  auto ranks = StartAll(endpoint(), {.job = "watched"});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  ChildProcess watch = Run({"steps", "watched", "--watch", "-o", "json"});
  EXPECT_EQ(json::parse(watch.ReadLine().value_or("{}"))["step"], 1);
  for (int step = 2; step <= 4; ++step) {
    ASSERT_TRUE(TrainAll(ranks, 1).ok());
    EXPECT_EQ(json::parse(watch.ReadLine().value_or("{}"))["step"], step);
  }
  watch.Signal(SIGINT);
  EXPECT_EQ(watch.ReadAll(), "");
  EXPECT_EQ(watch.Wait(), 130);
  EXPECT_TRUE(TrainAll(ranks, 1).ok());
}

TEST_F(Ctl, CtrlCIsHeardWhileStepsPourIn) {
  auto ranks = StartAll(endpoint(), {.job = "busy"});
  ChildProcess watch = Run({"steps", "busy", "--watch"});
  ASSERT_TRUE(watch.ReadLine().has_value());  // the header: it is listening
  std::atomic<bool> over{false};
  absl::Status trained;
  std::thread training([&] {
    while (!over && trained.ok()) trained = TrainAll(ranks, 1);
  });
  for (int i = 0; i < 20; ++i) watch.ReadLine();
  watch.Signal(SIGINT);
  std::thread reader([&] { watch.ReadAll(); });
  EXPECT_EQ(watch.Wait(), 130);
  reader.join();
  over = true;
  training.join();
  EXPECT_TRUE(trained.ok()) << trained;
}

TEST_F(Ctl, ExitCodesAreTheDocumentedOnes) {
  EXPECT_EQ(Code({"session", "nobody"}), 8);
  EXPECT_EQ(Code({"steps", "nobody"}), 8);
  EXPECT_EQ(Code({"steps", "a\xff"}), 3);
  EXPECT_EQ(Code({"no-such-verb"}), 64);
  EXPECT_EQ(Code({"session"}), 64);
  EXPECT_EQ(Code({"status", "-o", "xml"}), 64);
  EXPECT_EQ(Code({"--help"}), 0);
  EXPECT_EQ(Code({"--endpoint", "/nonexistent", "status"}), 2);
  EXPECT_EQ(Code({"--endpoint", "", "status"}), 3);
}

TEST_F(Ctl, AWrongCommandLineIsUsageAndSaysWhatIsWrong) {
  for (const char* id : {"-1", "18446744073709551616", "last"}) {
    EXPECT_THAT(Words({"step", "bystander", id}, 64),
                AllOf(StartsWith("dmuonctl: ID: expected a whole number from 0"),
                      HasSubstr(std::string("got '") + id + "'")));
  }
  for (const char* timeout : {"0", "nan", "-1", "1e300"}) {
    EXPECT_THAT(Words({"--timeout", timeout, "status"}, 64),
                AllOf(StartsWith("dmuonctl: --timeout: expected 0.001 to 86400 seconds"),
                      HasSubstr(std::string("got '") + timeout + "'")));
  }
  EXPECT_THAT(Words({"steps", "bystander", "--last", "-1"}, 64), HasSubstr("--last: expected"));
  EXPECT_THAT(Words({"statuss"}, 64),
              AllOf(StartsWith("dmuonctl: no such command: 'statuss'; did you mean 'status'?"),
                    HasSubstr("Commands: status, sessions, session, steps, step, drain")));
  EXPECT_THAT(Words({"--colour"}, 64), StartsWith("dmuonctl: no such option: --colour"));
  EXPECT_THAT(Words({"session"}, 64), StartsWith("dmuonctl: NAME is required"));
  EXPECT_THAT(Words({"--endpoint", endpoint() + "/control.sock", "status"}, 3),
              HasSubstr("expected the directory that holds the sockets"));
}

TEST_F(Ctl, AWatchSaysThatItsSessionHasEnded) {
  auto ranks = StartAll(endpoint(), {.job = "short"});
  const std::string log = daemon().directory() + "/watch-words";
  ChildProcess watch = Run({"steps", "short", "--watch"}, {.stderr_path = log});
  ASSERT_TRUE(watch.ReadLine().has_value());  // the header
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  ASSERT_TRUE(watch.ReadLine().has_value());  // it is listening
  ASSERT_TRUE(ranks[0]->session().Close().ok());
  watch.ReadAll();
  EXPECT_EQ(watch.Wait(), 0);
  EXPECT_EQ(ChildProcess({"/bin/cat", log}).ReadAll(), "dmuonctl: session 'short' has ended\n");
}

TEST_F(Ctl, NoDaemonIsExplained) {
  const TemporaryDirectory nothing;
  const std::string log = daemon().directory() + "/ctl-error";
  ChildProcess ctl({Program("dmuonctl"), "--endpoint", nothing.path(), "status"},
                   {.stderr_path = log});
  EXPECT_EQ(ctl.Wait(), 2);
  ChildProcess cat({"/bin/cat", log});
  EXPECT_THAT(cat.ReadAll(),
              AllOf(HasSubstr(nothing.path() + "/control.sock"), HasSubstr("dmuond --socket-dir")));
}

TEST_F(Ctl, ADaemonThatDoesNotAnswerTimesOut) {
  daemon().Signal(SIGSTOP);
  const int code = Code({"--timeout", "0.2", "status"});
  daemon().Signal(SIGCONT);
  EXPECT_EQ(code, 9);
}

class SharedCtl : public Ctl {
 protected:
  SharedCtl() : Ctl(Options{.shared = true}) {}
};

TEST_F(SharedCtl, AnotherUserSeesTheDaemonAndMayNotDrainIt) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can run as another user";
  const std::string copy = daemon().directory() + "/dmuonctl";
  std::filesystem::copy_file(Program("dmuonctl"), copy);
  ChildProcess drain({copy, "--endpoint", endpoint(), "drain"},
                     {.uid = 12345, .stderr_path = "/dev/null"});
  EXPECT_EQ(drain.Wait(), 7);
  ChildProcess status({copy, "--endpoint", endpoint(), "status"}, {.uid = 12345});
  EXPECT_THAT(status.ReadAll(), HasSubstr("version"));
  EXPECT_EQ(status.Wait(), 0);
}

class DrainCtl : public Ctl {
 protected:
  DrainCtl() : Ctl(Options{.bystander = false}) {}
};

TEST_F(DrainCtl, AWatchSaysThatItsDaemonIsGone) {
  NoDaemonLeft();
  auto ranks = StartAll(endpoint(), {.job = "orphaned"});
  const std::string log = daemon().directory() + "/watch-words";
  ChildProcess watch = Run({"steps", "orphaned", "--watch"}, {.stderr_path = log});
  ASSERT_TRUE(watch.ReadLine().has_value());  // the header
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  ASSERT_TRUE(watch.ReadLine().has_value());  // it is listening
  daemon().Signal(SIGKILL);
  watch.ReadAll();
  EXPECT_EQ(watch.Wait(), 2);
  EXPECT_EQ(ChildProcess({"/bin/cat", log}).ReadAll(),
            "dmuonctl: the daemon at " + endpoint() + " has gone away\n");
}

TEST_F(DrainCtl, DrainRefusesNewSessionsAndEndsTheDaemonCleanly) {
  NoDaemonLeft();
  auto ranks = StartAll(endpoint(), {.job = "drained", .world = 2});
  ASSERT_TRUE(TrainAll(ranks, 1).ok());
  EXPECT_EQ(json::parse(Output({"drain", "-o", "json"}))["draining"], true);
  EXPECT_EQ(daemon().Wait(), 0);
  EXPECT_EQ(TrainAll(ranks, 1).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Code({"status"}), 2);
}

}  // namespace
}  // namespace dmuon::testing
