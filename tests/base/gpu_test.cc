#include "base/gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace dmuon {
namespace {

using ::testing::HasSubstr;

TEST(Gpu, IsNamedAsTheDriversToolsNameIt) {
  unsigned char uuid[16];
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<unsigned char>(0x11 * i);
  EXPECT_EQ(GpuName(uuid, "NVIDIA H100 80GB HBM3"), "GPU-00112233-4455-6677-8899-aabbccddeeff");
  const std::string mig = GpuName(uuid, "NVIDIA A100-SXM4-40GB MIG 1g.5gb");
  EXPECT_EQ(mig, "MIG-00112233-4455-6677-8899-aabbccddeeff");
  EXPECT_TRUE(IsMig(mig));
  EXPECT_FALSE(IsMig(GpuName(uuid, "NVIDIA MIGHTY")));
}

TEST(Gpu, WhatIsInTheWayOfSharingIsNamed) {
  EXPECT_TRUE(CheckShareable("GPU-1", {}).ok());
  const absl::Status prohibited = CheckShareable("GPU-1", {.mode = ComputeMode::kProhibited});
  EXPECT_EQ(prohibited.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(prohibited.message()), HasSubstr("GPU-1 is in compute mode prohibited"));
  EXPECT_THAT(std::string(CheckShareable("GPU-1", {.ipc = false}).message()),
              HasSubstr("does not share device memory between processes"));
}

TEST(Gpu, WslIsKnownByItsKernel) {
  EXPECT_TRUE(IsWsl("5.15.153.1-microsoft-standard-WSL2"));
  EXPECT_TRUE(IsWsl("4.4.0-19041-Microsoft"));
  EXPECT_FALSE(IsWsl("6.8.0-45-generic"));
}

}  // namespace
}  // namespace dmuon
