#include "kernels/cpu/pages.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

namespace dmuon::kernels::cpu {
namespace {

size_t ResidentBytes() {
  FILE* file = fopen("/proc/self/statm", "r");
  long size = 0, resident = 0;
  EXPECT_EQ(fscanf(file, "%ld %ld", &size, &resident), 2);
  fclose(file);
  return static_cast<size_t>(resident) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

TEST(Pages, AreZeroedAndAligned) {
  for (const size_t bytes :
       {1u, 256u, 4096u, 4097u, 700'000u, 2u << 20, (2u << 20) + 1, 5'000'000u}) {
    auto* const memory = static_cast<uint8_t*>(AllocatePages(bytes));
    ASSERT_NE(memory, nullptr) << bytes;
    const size_t alignment = bytes >= (2u << 20) ? 2u << 20 : 4096;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % alignment, 0u) << bytes;
    EXPECT_TRUE(std::all_of(memory, memory + bytes, [](uint8_t b) { return b == 0; })) << bytes;
    std::fill(memory, memory + bytes, 0xab);
    FreePages(memory);
  }
  FreePages(nullptr);
}

TEST(Pages, MoreThanTheMachineHasIsNull) {
  EXPECT_EQ(AllocatePages(size_t{1} << 50), nullptr);
  EXPECT_EQ(AllocatePages(std::numeric_limits<size_t>::max()), nullptr);
}

TEST(Pages, WhatIsFreedIsTheMachinesAgainWhateverTheOrder) {
  const size_t before = ResidentBytes();
  for (int round = 0; round < 50; ++round) {
    std::vector<void*> held;
    for (size_t i = 0; i < 16; ++i) held.push_back(AllocatePages(100'000 + 300'000 * (i % 5)));
    for (size_t i = 0; i < held.size(); ++i) FreePages(held[i * 7 % held.size()]);
  }
  EXPECT_LT(ResidentBytes(), before + (1u << 20));
}

}  // namespace
}  // namespace dmuon::kernels::cpu
