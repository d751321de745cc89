// What a core can do at most: multiply-adds on registers alone.
#ifndef DMUON_TESTS_BENCHMARK_PEAK_H_
#define DMUON_TESTS_BENCHMARK_PEAK_H_

#include <string>

namespace dmuon {

// FLOP/s of one core in fp32, or in bf16 with fp32 sums, with the instructions of `kernel` (of CpuKernelNames());
// 0 where it has none of its own. Takes some milliseconds.
double PeakFlops(const std::string& kernel, bool bf16);

}  // namespace dmuon

#endif  // DMUON_TESTS_BENCHMARK_PEAK_H_
