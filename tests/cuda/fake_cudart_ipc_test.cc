// The stand-in's rules between processes, and those that its environment sets. Without these nothing that runs on it means
// anything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "tests/cuda/cuda_process.h"

namespace dmuon::cuda {
namespace {

using testing::HasSubstr;

constexpr char kMiB4[] = "4194304";

std::string Malloc(CudaProcess& process) { return process.Do(std::string("malloc ") + kMiB4); }

TEST(FakeIpc, WhatTheExporterWritesTheImporterReadsAndTheOtherWayRound) {
  CudaProcess trainer, daemon;
  const std::string there = Malloc(trainer);
  const std::string here = daemon.Do("open " + trainer.Do("handle " + there));
  EXPECT_EQ(daemon.Do("peek " + here + " 4194303"), "255");  // fresh memory is NaN
  trainer.Do("fill " + there + " 7 4194304");
  trainer.Do("sync");
  EXPECT_EQ(daemon.Do("peek " + here + " 0"), "7");
  daemon.Do("fill " + here + " 9 4194304");
  daemon.Do("sync");
  EXPECT_EQ(trainer.Do("peek " + there + " 4194303"), "9");
}

TEST(FakeIpc, WhatWasNotWaitedForIsNotThere) {
  CudaProcess trainer, daemon;
  const std::string there = Malloc(trainer);
  const std::string here = daemon.Do("open " + trainer.Do("handle " + there));
  trainer.Do("fill " + there + " 7 4194304");
  EXPECT_EQ(daemon.Do("peek " + here + " 0"), "255");
}

TEST(FakeIpc, OpeningInTheExportingProcessIsAnError) {
  CudaProcess trainer;
  const std::string handle = trainer.Do("handle " + Malloc(trainer));
  EXPECT_EQ(trainer.Ask("open " + handle).error, cudaErrorDeviceUninitialized);
}

TEST(FakeIpc, OpeningTwiceGivesTheSameAddressAndIsClosedTwice) {
  CudaProcess trainer, daemon;
  const std::string handle = trainer.Do("handle " + Malloc(trainer));
  const std::string first = daemon.Do("open " + handle);
  EXPECT_EQ(daemon.Do("open " + handle), first);
  EXPECT_EQ(daemon.Do("imports"), "1");
  daemon.Do("close " + first);
  daemon.Do("peek " + first + " 0");
  daemon.Do("close " + first);
  EXPECT_EQ(daemon.Do("imports"), "0");
  EXPECT_EQ(daemon.Ask("close " + first).error, cudaErrorInvalidValue);
  EXPECT_EQ(daemon.Ask("peek " + first + " 0").error, cudaErrorInvalidValue);
}

TEST(FakeIpc, AHandleOfAnInnerAddressOpensTheWholeAllocation) {
  CudaProcess trainer, daemon;
  const std::string base = Malloc(trainer);
  std::ostringstream inner;
  inner << std::hex << std::stoull(base, nullptr, 16) + 512;
  trainer.Do("fill " + base + " 3 1");
  trainer.Do("sync");
  const std::string here = daemon.Do("open " + trainer.Do("handle " + inner.str()));
  EXPECT_EQ(daemon.Do("peek " + here + " 0"), "3");
  EXPECT_EQ(daemon.Do("peek " + here + " 4194303"), "255");
  EXPECT_EQ(daemon.Ask("peek " + here + " 4194304").error, cudaErrorInvalidValue);
}

TEST(FakeIpc, AHandleOfADeadOrForeignExporterIsRefused) {
  CudaProcess daemon;
  std::string handle;
  {
    CudaProcess trainer;
    handle = trainer.Do("handle " + Malloc(trainer));
  }
  EXPECT_EQ(daemon.Ask("open " + handle).error, cudaErrorInvalidResourceHandle);
  handle.replace(0, 8, "00000000");
  EXPECT_EQ(daemon.Ask("open " + handle).error, cudaErrorInvalidResourceHandle);
}

TEST(FakeIpc, AHandleOfFreedMemoryIsRefused) {
  CudaProcess trainer, daemon;
  const std::string memory = Malloc(trainer);
  const std::string handle = trainer.Do("handle " + memory);
  trainer.Do("free " + memory);
  EXPECT_EQ(daemon.Ask("open " + handle).error, cudaErrorMapBufferObjectFailed);
}

TEST(FakeIpc, MemoryOfTheDeadIsNaN) {
  CudaProcess daemon;
  std::string here;
  {
    CudaProcess trainer;
    const std::string there = Malloc(trainer);
    here = daemon.Do("open " + trainer.Do("handle " + there));
    trainer.Do("fill " + there + " 7 4194304");
    trainer.Do("sync");
    EXPECT_EQ(daemon.Do("peek " + here + " 0"), "7");
  }
  EXPECT_EQ(daemon.Do("peek " + here + " 0"), "255");
  daemon.Do("close " + here);
}

TEST(FakeIpc, FreeingWhatAnotherHasOpenEndsTheProcess) {
  CudaProcess trainer, daemon;
  const std::string memory = Malloc(trainer);
  daemon.Do("open " + trainer.Do("handle " + memory));
  EXPECT_EQ(trainer.Ask("free " + memory).error, cudaErrorUnknown);
  EXPECT_EQ(trainer.End(), 128 + SIGABRT);
}

TEST(FakeIpc, FreeingAfterTheOtherClosedOrDiedIsRight) {
  CudaProcess trainer;
  const std::string closed = Malloc(trainer), died = Malloc(trainer);
  {
    CudaProcess daemon;
    daemon.Do("close " + daemon.Do("open " + trainer.Do("handle " + closed)));
    daemon.Do("open " + trainer.Do("handle " + died));
    trainer.Do("free " + closed);
  }
  trainer.Do("free " + died);
}

TEST(FakeIpc, ClosingUnderAWaitingOperationEndsTheProcess) {
  CudaProcess trainer, daemon;
  const std::string here = daemon.Do("open " + trainer.Do("handle " + Malloc(trainer)));
  daemon.Do("fill " + here + " 1 16");
  EXPECT_EQ(daemon.Ask("close " + here).error, cudaErrorUnknown);
  EXPECT_EQ(daemon.End(), 128 + SIGABRT);
}

TEST(FakeIpc, IsNotForMemoryOfAPoolNorForAnImport) {
  CudaProcess trainer, daemon;
  EXPECT_EQ(trainer.Ask("handle " + trainer.Do("pool 4096")).error, cudaErrorInvalidValue);
  const std::string here = daemon.Do("open " + trainer.Do("handle " + Malloc(trainer)));
  EXPECT_EQ(daemon.Ask("handle " + here).error, cudaErrorInvalidValue);
  EXPECT_EQ(daemon.Ask("free " + here).error, cudaErrorInvalidValue);
}

TEST(FakeIpc, WantsItsOneFlagAndCanBeMissing) {
  CudaProcess trainer, daemon, wsl({"DMUON_FAKE_CUDA_IPC=none"});
  const std::string handle = trainer.Do("handle " + Malloc(trainer));
  EXPECT_EQ(daemon.Ask("open " + handle + " 0").error, cudaErrorInvalidValue);
  EXPECT_EQ(wsl.Ask("handle " + Malloc(wsl)).error, cudaErrorNotSupported);
  EXPECT_EQ(wsl.Ask("open " + handle).error, cudaErrorNotSupported);
}

TEST(FakeIpc, IsNotForWhatAnotherAllocatorGivesInPlaceOfCudaMalloc) {
  CudaProcess replaced({"DMUON_FAKE_CUDA_MALLOC=pool"});
  const std::string memory = Malloc(replaced);
  EXPECT_EQ(replaced.Ask("handle " + memory).error, cudaErrorInvalidValue);
  replaced.Do("free " + memory);
}

TEST(FakeIpc, DoesNotCrossMigInstances) {
  const std::string devices = "DMUON_FAKE_CUDA_DEVICES=mig,mig";
  CudaProcess trainer({devices, "CUDA_VISIBLE_DEVICES=1"});
  CudaProcess same({devices, "CUDA_VISIBLE_DEVICES=1"}), other({devices, "CUDA_VISIBLE_DEVICES=0"});
  const std::string handle = trainer.Do("handle " + Malloc(trainer));
  same.Do("open " + handle);
  EXPECT_EQ(other.Ask("open " + handle).error, cudaErrorInvalidResourceHandle);
}

TEST(FakeIpc, IsClosedOnTheDeviceThatOpenedIt) {
  CudaProcess trainer, daemon({"DMUON_FAKE_CUDA_DEVICES=2"});
  const std::string here = daemon.Do("open " + trainer.Do("handle " + Malloc(trainer)));
  daemon.Do("set 1");
  EXPECT_EQ(daemon.Ask("close " + here).error, cudaErrorInvalidResourceHandle);
  daemon.Do("set 0");
  daemon.Do("close " + here);
}

TEST(FakeIpc, CrossesDevicesOnlyWherePeersReachEachOther) {
  CudaProcess trainer({"DMUON_FAKE_CUDA_DEVICES=2"});
  trainer.Do("set 1");
  const std::string handle = trainer.Do("handle " + Malloc(trainer));
  CudaProcess peers({"DMUON_FAKE_CUDA_DEVICES=2"});
  EXPECT_EQ(peers.Do("attributes " + peers.Do("open " + handle)), "2 1");
  CudaProcess apart({"DMUON_FAKE_CUDA_DEVICES=2", "DMUON_FAKE_CUDA_PEERS=none"});
  EXPECT_EQ(apart.Ask("open " + handle).error, cudaErrorPeerAccessUnsupported);
  apart.Do("set 1");
  apart.Do("open " + handle);
}

TEST(FakeDevices, AreCountedAndNamedByIdWhateverTheirOrder) {
  CudaProcess all({"DMUON_FAKE_CUDA_DEVICES=3"});
  EXPECT_EQ(all.Do("count"), "3");
  const std::string first = all.Do("properties 0"), last = all.Do("properties 2");
  EXPECT_NE(first, last);
  CudaProcess permuted({"DMUON_FAKE_CUDA_DEVICES=3", "CUDA_VISIBLE_DEVICES=2,0"});
  EXPECT_EQ(permuted.Do("count"), "2");
  EXPECT_EQ(permuted.Do("properties 0"), last);
  EXPECT_EQ(permuted.Do("properties 1"), first);
  // The list ends at what cannot be read.
  CudaProcess cut({"DMUON_FAKE_CUDA_DEVICES=3", "CUDA_VISIBLE_DEVICES=1,9,0"});
  EXPECT_EQ(cut.Do("count"), "1");
  CudaProcess none({"DMUON_FAKE_CUDA_DEVICES=3", "CUDA_VISIBLE_DEVICES="});
  EXPECT_EQ(none.Ask("count").error, cudaErrorNoDevice);
}

TEST(FakeDevices, PermutedOnesMeetInTheirIds) {
  CudaProcess trainer({"DMUON_FAKE_CUDA_DEVICES=2", "CUDA_VISIBLE_DEVICES=1"});
  CudaProcess daemon({"DMUON_FAKE_CUDA_DEVICES=2"});
  const std::string here = daemon.Do("open " + trainer.Do("handle " + Malloc(trainer)));
  EXPECT_EQ(daemon.Do("attributes " + here), "2 1");  // its 0 is our 1
}

TEST(FakeDevices, AMigInstanceHasAnIdOfItsOwnAndNoPeers) {
  CudaProcess process({"DMUON_FAKE_CUDA_DEVICES=gpu,mig,mig"});
  EXPECT_THAT(process.Do("properties 1"), HasSubstr("MIG"));
  EXPECT_EQ(process.Do("peer 1 2"), "0");
  EXPECT_EQ(process.Do("peer 0 1"), "0");
  const std::string id = process.Do("properties 1").substr(0, 8);
  CudaProcess chosen({"DMUON_FAKE_CUDA_DEVICES=gpu,mig,mig", "CUDA_VISIBLE_DEVICES=MIG-" + id});
  EXPECT_EQ(chosen.Do("count"), "1");
}

TEST(FakeDevices, ExclusiveOnesTakeOneProcess) {
  const std::string node = "DMUON_FAKE_CUDA_NODE=" + std::to_string(getpid());
  const std::vector<std::string> environment = {"DMUON_FAKE_CUDA_COMPUTE_MODE=exclusive", node};
  CudaProcess second(environment);
  {
    CudaProcess first(environment);
    first.Do("malloc 256");
    EXPECT_EQ(second.Do("count"), "1");  // what needs no context still works
    EXPECT_EQ(second.Ask("malloc 256").error, cudaErrorDevicesUnavailable);
  }
  second.Do("malloc 256");
}

TEST(FakeDevices, ExclusiveOnesTakeAnyNumberThroughMps) {
  const std::string folder = testing::TempDir() + "mps_" + std::to_string(getpid());
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  std::ofstream(folder + "/control") << "";
  const std::vector<std::string> environment = {"DMUON_FAKE_CUDA_COMPUTE_MODE=exclusive",
                                                "DMUON_FAKE_CUDA_NODE=" + folder,
                                                "CUDA_MPS_PIPE_DIRECTORY=" + folder};
  CudaProcess first(environment), second(environment);
  first.Do("malloc 256");
  second.Do("malloc 256");
  std::remove((folder + "/control").c_str());
  rmdir(folder.c_str());
}

TEST(FakeDevices, MayBeInAModeEach) {
  CudaProcess process(
      {"DMUON_FAKE_CUDA_DEVICES=2", "DMUON_FAKE_CUDA_COMPUTE_MODE=default,prohibited"});
  process.Do("malloc 256");
  EXPECT_EQ(process.Ask("set 1").error, cudaErrorDevicesUnavailable);
}

TEST(FakeDevices, ProhibitedOnesTakeNone) {
  CudaProcess process({"DMUON_FAKE_CUDA_COMPUTE_MODE=prohibited"});
  EXPECT_EQ(process.Ask("malloc 256").error, cudaErrorDevicesUnavailable);
  EXPECT_EQ(process.Do("count"), "1");
}

TEST(FakeDevices, PeersAreEnabledOnce) {
  CudaProcess process({"DMUON_FAKE_CUDA_DEVICES=2"});
  EXPECT_EQ(process.Do("peer 0 1"), "1");
  process.Do("enable 1");
  EXPECT_EQ(process.Ask("enable 1").error, cudaErrorPeerAccessAlreadyEnabled);
  CudaProcess apart({"DMUON_FAKE_CUDA_DEVICES=2", "DMUON_FAKE_CUDA_PEERS=none"});
  EXPECT_EQ(apart.Ask("enable 1").error, cudaErrorPeerAccessUnsupported);
  CudaProcess pairs({"DMUON_FAKE_CUDA_DEVICES=4", "DMUON_FAKE_CUDA_PEERS=0-1,2-3"});
  for (const std::string pair : {"0 1", "1 0", "3 2"}) EXPECT_EQ(pairs.Do("peer " + pair), "1");
  for (const std::string pair : {"0 2", "1 2", "3 0"}) EXPECT_EQ(pairs.Do("peer " + pair), "0");
}

TEST(FakeDevices, HaveOnlySoMuchMemory) {
  CudaProcess process({"DMUON_FAKE_CUDA_MEMORY=1048576"});
  const std::string half = process.Do("malloc 524288");
  EXPECT_EQ(process.Ask("malloc 524544").error, cudaErrorMemoryAllocation);
  process.Do("free " + half);
  process.Do("malloc 1048576");
}

TEST(FakeProcess, DoesNotSurviveAFork) {
  CudaProcess process;
  process.Do("malloc 256");
  EXPECT_EQ(process.Ask("fork").error, cudaErrorInitializationError);
}

TEST(FakeProcess, ObeysTheScriptOfItsEnvironment) {
  CudaProcess process(
      {"DMUON_FAKE_CUDA_FAULTS=cudaMalloc:2=fail(2);cudaIpcGetMemHandle:1+=fail(801)"});
  const std::string memory = process.Do("malloc 256");
  EXPECT_EQ(process.Ask("malloc 256").error, cudaErrorMemoryAllocation);
  process.Do("malloc 256");
  EXPECT_EQ(process.Ask("handle " + memory).error, cudaErrorNotSupported);
  EXPECT_EQ(process.Ask("handle " + memory).error, cudaErrorNotSupported);
  CudaProcess killed({"DMUON_FAKE_CUDA_FAULTS=cudaMalloc:1=kill"});
  EXPECT_EQ(killed.Ask("malloc 256").error, cudaErrorUnknown);
  EXPECT_EQ(killed.End(), 128 + SIGKILL);
  CudaProcess wrong({"DMUON_FAKE_CUDA_FAULTS=cudaMalloc=fail"});
  EXPECT_EQ(wrong.Ask("malloc 256").error, cudaErrorUnknown);
  EXPECT_EQ(wrong.End(), 128 + SIGABRT);
}

TEST(FakeProcess, SaysAtItsEndWhatItDidNotGiveBack) {
  CudaProcess leaking({"DMUON_FAKE_CUDA_LEAKS=fail"});
  leaking.Do("malloc 256");
  EXPECT_EQ(leaking.End(), 99);
  CudaProcess clean({"DMUON_FAKE_CUDA_LEAKS=fail"});
  clean.Do("free " + clean.Do("malloc 256"));
  EXPECT_EQ(clean.End(), 0);
}

TEST(FakeProcess, ReportsItsCallsAndLeaksAsJson) {
  const std::string path = testing::TempDir() + "fake_cuda_report_" + std::to_string(getpid());
  std::string file;
  {
    CudaProcess process({"DMUON_FAKE_CUDA_REPORT=" + path});
    file = path + "." + std::to_string(process.pid());
    process.Do("malloc 512");
    process.Do("free " + process.Do("malloc 256"));
    EXPECT_EQ(process.End(), 0);
  }
  std::stringstream report;
  report << std::ifstream(file).rdbuf();
  std::remove(file.c_str());
  EXPECT_THAT(report.str(), HasSubstr("\"allocations\": 2"));
  EXPECT_THAT(report.str(), HasSubstr("\"cudaMalloc\": 2"));
  EXPECT_THAT(report.str(), HasSubstr("\"leaks\": [\"device memory, 512 bytes\"]"));
}

}  // namespace
}  // namespace dmuon::cuda

int main(int argc, char** argv) {
  if (dmuon::cuda::IsCudaProcess(argc, argv)) return dmuon::cuda::RunCudaProcess();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
