// Counts heap allocations by the process's worker threads (those named slot-N) and by all its threads. Replaces malloc
// and its kin in the program that links it.
#ifndef DMUON_TESTS_BENCHMARK_ALLOCATION_COUNT_H_
#define DMUON_TESTS_BENCHMARK_ALLOCATION_COUNT_H_

#include <atomic>
#include <cstdint>

namespace dmuon::bench {

// In memory that several processes share, so that another one can say when to count.
struct AllocationCount {
  std::atomic<bool> counting{false};
  std::atomic<int64_t> on_workers{0};
  std::atomic<int64_t> on_all{0};
};

// From now on; nullptr: never. Only allocations of the calling process are counted.
void CountAllocationsIn(AllocationCount* count);

}  // namespace dmuon::bench

#endif  // DMUON_TESTS_BENCHMARK_ALLOCATION_COUNT_H_
