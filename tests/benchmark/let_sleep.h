// What is measured from here on begins with a wake-up.
#ifndef DMUON_TESTS_BENCHMARK_LET_SLEEP_H_
#define DMUON_TESTS_BENCHMARK_LET_SLEEP_H_

#include <time.h>

#include <atomic>
#include <cstdint>

namespace dmuon::bench {

// Until the other side sleeps, and a little longer: its futex call must have been made.
inline void LetSleep(const std::atomic<uint32_t>& sleeps) {
  while (sleeps == 0) {
  }
  const timespec pause = {.tv_sec = 0, .tv_nsec = 200'000};
  nanosleep(&pause, nullptr);
}

}  // namespace dmuon::bench

#endif  // DMUON_TESTS_BENCHMARK_LET_SLEEP_H_
