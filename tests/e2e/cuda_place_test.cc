// Where a trainer and a daemon meet on a GPU: devices by other numbers, MIG, compute modes, MPS, WSL, containers, allocators.
// Either they train, or one reason is said, at the daemon's start or at attach. On the stand-ins for CUDA.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/daemon_process.h"
#include "tests/support/environment.h"

namespace dmuon::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kBackendExit = 5;
constexpr char kTrained[] = "closed";
constexpr char kVisible[] = "CUDA_VISIBLE_DEVICES", kDevices[] = "DMUON_FAKE_CUDA_DEVICES";
constexpr char kMode[] = "DMUON_FAKE_CUDA_COMPUTE_MODE", kFaults[] = "DMUON_FAKE_CUDA_FAULTS";
constexpr char kMps[] = "CUDA_MPS_PIPE_DIRECTORY", kIpc[] = "DMUON_FAKE_CUDA_IPC";
// The stand-in's second and third device where they are MIG instances.
constexpr char kMig1[] = "MIG-646d756f-6e20-6661-6b65-206d69670001";
constexpr char kMig2[] = "MIG-646d756f-6e20-6661-6b65-206d69670002";

// How one side is started: its environment, and a line of shell that ends in running "$@".
struct Side {
  Environment environment = {};
  std::string by = {};
};

class CudaPlace : public ::testing::Test {
 protected:
  // What a trainer that steps once says in the end.
  std::string Meet(const Side& daemon, const Side& trainer) {
    StartDaemon(daemon);
    return Train(trainer, 1, 0).ReadAll();
  }
  void StartDaemon(const Side& side) {
    const ScopedEnvironment scope(side.environment);
    daemon_ = std::make_unique<DaemonProcess>(Started("dmuond", side.by),
                                              std::vector<std::string>{"--backend=cuda"});
  }
  ChildProcess Train(const Side& side, int world, int rank) {
    const ScopedEnvironment scope(side.environment);
    return ChildProcess({Started("e2e_trainer", side.by), "once", daemon_->endpoint(), "job",
                         std::to_string(world), std::to_string(rank)});
  }
  // What a daemon says that does not start.
  std::string Refusal(const Side& side) {
    const ScopedEnvironment scope(side.environment);
    const std::string log = directory_.path() + "/refusal";
    ChildProcess process({Started("dmuond", side.by), "--backend=cuda", "--calibration-file", "",
                          "--socket-dir", directory_.path() + "/run"},
                         {.stderr_path = log});
    EXPECT_EQ(process.Wait(), kBackendExit);
    std::ostringstream text;
    text << std::ifstream(log).rdbuf();
    return text.str();
  }
  DaemonProcess& daemon() { return *daemon_; }
  // A folder in which the server of MPS listens, as far as a client can see.
  std::string Mps() {
    const std::string path = directory_.path() + "/mps";
    mkdir(path.c_str(), 0700);
    std::ofstream(path + "/control") << "";
    return path;
  }
  std::string File(const std::string& name, const std::string& text) {
    const std::string path = directory_.path() + "/" + name;
    std::ofstream(path) << text;
    return path;
  }

 private:
  std::string Started(const std::string& program, const std::string& by) {
    if (by.empty()) return Program(program);
    const std::string script =
        File(program + ".sh", "#!/bin/sh\nset -- " + Program(program) + " \"$@\"\n" + by + "\n");
    chmod(script.c_str(), 0700);
    return script;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<DaemonProcess> daemon_;
};

// Whether this user may make such namespaces.
bool MayUnshare(const std::string& kinds) {
  return std::system(("unshare " + kinds + " true 2>/dev/null").c_str()) == 0;
}

TEST_F(CudaPlace, DevicesAreKnownByTheirIdsWhateverTheirOrder) {
  struct Case {
    const char *daemon, *trainer;
  };
  for (const Case& c : {Case{"0,1,2", "1,0"}, Case{"2,0,1", "0,1,2"}, Case{"1,2,0", "2,1"},
                        Case{"2,1", "1"}, Case{"GPU-646d756f-6e20-6661-6b65-206770750001", "1"}}) {
    EXPECT_THAT(
        Meet({{{kDevices, "3"}, {kVisible, c.daemon}}}, {{{kDevices, "3"}, {kVisible, c.trainer}}}),
        HasSubstr(kTrained))
        << c.daemon << " and " << c.trainer;
  }
}

TEST_F(CudaPlace, RanksOnTwoDevicesMeetADaemonThatNumbersThemOtherwise) {
  constexpr char kTestDevices[] = "DMUON_TEST_DEVICES";  // ranks take turns on so many of theirs
  StartDaemon({{{kDevices, "3"}, {kVisible, "2,0,1"}}});
  ChildProcess first = Train({{{kDevices, "3"}, {kVisible, "1,2"}, {kTestDevices, "2"}}}, 2, 0);
  ChildProcess second = Train({{{kDevices, "3"}, {kVisible, "1,2"}, {kTestDevices, "2"}}}, 2, 1);
  EXPECT_THAT(first.ReadAll(), HasSubstr("step 1"));
  EXPECT_THAT(second.ReadAll(), HasSubstr("step 1"));
}

TEST_F(CudaPlace, ADeviceThatTheDaemonDoesNotSeeIsNamed) {
  const Side three{{{kDevices, "3"}, {kVisible, "2"}}};
  EXPECT_THAT(Meet({{{kDevices, "3"}, {kVisible, "1,0"}}}, three),
              AllOf(HasSubstr("NOT_FOUND: session 'job': rank 0: gpu_uuid: expected one that the "
                              "daemon sees (GPU-"),
                    HasSubstr("look at the daemon's CUDA_VISIBLE_DEVICES")));
}

TEST_F(CudaPlace, AMigInstanceIsSharedWithItselfAlone) {
  const Side first{{{kDevices, "gpu,mig,mig"}, {kVisible, kMig1}}};
  const Side second{{{kDevices, "gpu,mig,mig"}, {kVisible, kMig2}}};
  const Side whole{{{kDevices, "gpu,mig,mig"}, {kVisible, "0"}}};
  EXPECT_THAT(Meet(first, first), HasSubstr(kTrained));
  const auto apart = AllOf(HasSubstr("NOT_FOUND"),
                           HasSubstr("memory is not shared between MIG instances: trainer and "
                                     "daemon need the same one in CUDA_VISIBLE_DEVICES"));
  EXPECT_THAT(Meet(second, first), apart);
  EXPECT_THAT(Meet(whole, first), apart);
  EXPECT_THAT(Meet(first, whole), AllOf(HasSubstr("NOT_FOUND"), HasSubstr(kMig1)));
}

TEST_F(CudaPlace, RanksOnTwoMigInstancesAreRefused) {
  StartDaemon({{{kDevices, "gpu,mig,mig"}, {kVisible, std::string(kMig1) + "," + kMig2}}});
  ChildProcess first = Train({{{kDevices, "gpu,mig,mig"}, {kVisible, kMig1}}}, 2, 0);
  ChildProcess second = Train({{{kDevices, "gpu,mig,mig"}, {kVisible, kMig2}}}, 2, 1);
  const auto refused = HasSubstr("NCCL does not run on MIG instances");
  EXPECT_THAT(first.ReadAll(), refused);
  EXPECT_THAT(second.ReadAll(), refused);
}

TEST_F(CudaPlace, AProhibitedDeviceIsRefusedOnEitherSide) {
  const Side prohibited{{{kMode, "prohibited"}}};
  const auto said = HasSubstr("is in compute mode prohibited: expected default");
  EXPECT_THAT(Refusal(prohibited), said);
  EXPECT_THAT(Meet({}, prohibited), AllOf(HasSubstr("FAILED_PRECONDITION: GPU-"), said));
  // A device that the daemon only comes to when a trainer names it.
  EXPECT_THAT(Meet({{{kDevices, "2"}, {kMode, "default,prohibited"}}},
                   {{{kDevices, "2"}, {kVisible, "1"}}}),
              AllOf(HasSubstr("FAILED_PRECONDITION: session 'job': rank 0: GPU-"), said));
}

TEST_F(CudaPlace, AnExclusiveDeviceIsRefusedOnEitherSideUnlessBothUseMps) {
  const auto said = HasSubstr("is in an exclusive compute mode, so trainer and daemon cannot both");
  const Side alone{{{kMode, "exclusive"}, {"DMUON_FAKE_CUDA_NODE", Mps()}, {kMps, "/nowhere"}}};
  const Side by_mps{{{kMode, "exclusive"}, {"DMUON_FAKE_CUDA_NODE", Mps()}, {kMps, Mps()}}};
  EXPECT_THAT(Refusal(alone), said);
  EXPECT_THAT(Meet({}, alone), AllOf(HasSubstr("FAILED_PRECONDITION: GPU-"), said));
  EXPECT_THAT(Meet(by_mps, alone), AllOf(HasSubstr("FAILED_PRECONDITION: GPU-"), said));
  EXPECT_THAT(Meet({{{kDevices, "2"}, {kMode, "default,exclusive"}, {kMps, "/nowhere"}}},
                   {{{kDevices, "2"}, {kVisible, "1"}}}),
              AllOf(HasSubstr("FAILED_PRECONDITION: session 'job': rank 0: GPU-"), said));
  EXPECT_THAT(Meet(by_mps, by_mps), HasSubstr(kTrained));
  EXPECT_THAT(daemon().Log(), HasSubstr("shared with trainers by MPS"));
}

TEST_F(CudaPlace, AnExclusiveDeviceThatIsRefusedIsLeftToOthers) {
  const std::string node = File("node", "");
  StartDaemon({{{kMode, "exclusive"}, {"DMUON_FAKE_CUDA_NODE", node}, {kMps, "/nowhere"}},
               "exec \"$@\" --backend=auto"});
  EXPECT_THAT(daemon().Log(), AllOf(HasSubstr("cpu: "), HasSubstr("exclusive compute mode")));
  const int taken = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};  // by which the stand-in holds an exclusive device
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "dmuon_fake_gpu/%s/0",
                node.c_str());
  EXPECT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  close(taken);
}

TEST_F(CudaPlace, ADaemonSaysHowItsDeviceIsShared) {
  EXPECT_THAT(Meet({{{kMps, "/nowhere"}}}, {}), HasSubstr(kTrained));
  EXPECT_THAT(daemon().Log(), HasSubstr("shared with trainers by time slices"));
  EXPECT_THAT(Meet({{{kMps, Mps()}}}, {{{kMps, Mps()}}}), HasSubstr(kTrained));
  EXPECT_THAT(daemon().Log(), HasSubstr("shared with trainers by MPS"));
}

TEST_F(CudaPlace, ADeviceThatDoesNotShareItsMemoryIsRefusedOnEitherSide) {
  const Side none{{{kIpc, "none"}}};
  const auto said = HasSubstr("its driver does not share device memory between processes");
  EXPECT_THAT(Refusal(none), said);
  EXPECT_THAT(Meet({}, none), AllOf(HasSubstr("FAILED_PRECONDITION: GPU-"), said));
  // One that promises it and does not.
  EXPECT_THAT(Meet({}, {{{kFaults, "cudaIpcGetMemHandle:1=fail(801)"}}}),
              HasSubstr("FAILED_PRECONDITION: GRAD arena: cudaIpcGetMemHandle: "
                        "cudaErrorNotSupported"));
  EXPECT_THAT(Meet({{{kFaults, "cudaIpcOpenMemHandle:1=fail(801)"}}}, {}),
              AllOf(HasSubstr("FAILED_PRECONDITION: session 'job': rank 0: buffer 'grad'"),
                    HasSubstr("cannot share device memory between processes")));
}

TEST_F(CudaPlace, WslIsRefusedOnEitherSideAndAutoTakesTheProcessor) {
  if (!MayUnshare("--mount")) GTEST_SKIP() << "this user may not make a mount namespace";
  const std::string release = File("osrelease", "5.15.153.1-microsoft-standard-WSL2\n");
  const Side wsl{{},
                 "exec unshare --mount sh -c 'mount --bind " + release +
                     " /proc/sys/kernel/osrelease && exec \"$@\"' sh \"$@\""};
  const auto said = HasSubstr("not supported under WSL: use the cpu backend");
  EXPECT_THAT(Refusal(wsl), said);
  EXPECT_THAT(Meet({}, wsl), AllOf(HasSubstr("FAILED_PRECONDITION: "), said));
  Side automatic = wsl;
  automatic.by = "set -- \"$@\" --backend=auto\n" + wsl.by;
  EXPECT_THAT(Meet(automatic, wsl), HasSubstr(kTrained));
  EXPECT_THAT(daemon().Log(), AllOf(HasSubstr("cpu: "), said));
}

TEST_F(CudaPlace, MemoryOfAPoolIsRefusedInTheTrainer) {
  const Side pool{{{"DMUON_FAKE_CUDA_MALLOC", "pool"}}};
  EXPECT_THAT(Meet({}, pool),
              AllOf(HasSubstr("FAILED_PRECONDITION: GRAD arena: cudaIpcGetMemHandle: "
                              "cudaErrorInvalidValue"),
                    HasSubstr("comes from a memory pool or from virtual memory management")));
  EXPECT_THAT(Meet(pool, {}), HasSubstr(kTrained));  // its own memory is shown to nobody
}

TEST_F(CudaPlace, ATrainerWithoutWhatItNeedsSaysWhat) {
  EXPECT_THAT(Meet({}, {{{"DMUON_FAKE_CUDA_MEMORY", "3000000"}}}),
              HasSubstr("RESOURCE_EXHAUSTED: WEIGHT arena: allocating 2097152 bytes"));
  EXPECT_THAT(Meet({}, {{{kDevices, "0"}}}), HasSubstr("UNAVAILABLE: looking for CUDA devices"));
  EXPECT_THAT(Meet({}, {{{"LD_LIBRARY_PATH", ""}}}),
              AnyOf(HasSubstr("this process has no CUDA runtime"),
                    HasSubstr("cudaErrorInsufficientDriver")));
}

TEST_F(CudaPlace, ATrainerInOtherNamespacesIsToldWhich) {
  if (!MayUnshare("--pid --fork")) GTEST_SKIP() << "this user may not make a pid namespace";
  EXPECT_THAT(Meet({}, {{}, "exec unshare --pid --fork --kill-child --mount-proc \"$@\""}),
              AllOf(HasSubstr("session 'job': rank 0: buffer 'grad': ipc_handle: "),
                    HasSubstr("and daemon have different pid namespaces")));
  EXPECT_THAT(Meet({}, {{}, "exec unshare --ipc \"$@\""}),
              AllOf(HasSubstr("FAILED_PRECONDITION: session 'job': rank 0: buffer 'grad'"),
                    HasSubstr("cudaErrorMapBufferObjectFailed"),
                    HasSubstr("and daemon have different ipc namespaces")));
}

TEST_F(CudaPlace, ADaemonThatCannotSeeItsTrainersRefusesThemAtOnce) {
  if (!MayUnshare("--pid --fork")) GTEST_SKIP() << "this user may not make a pid namespace";
  EXPECT_THAT(Meet({{}, "exec unshare --pid --fork --kill-child --mount-proc \"$@\""}, {}),
              AllOf(HasSubstr("FAILED_PRECONDITION"),
                    HasSubstr("cannot be seen from the daemon's pid namespace")));
}

// The driver does not say more, and nothing else tells the containers apart.
TEST_F(CudaPlace, AMappingThatFailsSpeaksOfContainers) {
  for (const char* code : {"1", "201", "205", "400"}) {
    EXPECT_THAT(Meet({{{kFaults, std::string("cudaIpcOpenMemHandle:1=fail(") + code + ")"}}}, {}),
                AllOf(HasSubstr("buffer 'grad': ipc_handle: cudaIpcOpenMemHandle: cudaError"),
                      HasSubstr("pid namespace")))
        << code;
  }
}

}  // namespace
}  // namespace dmuon::testing
