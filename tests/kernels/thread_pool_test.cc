#include "kernels/cpu/thread_pool.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace dmuon::kernels::cpu {
namespace {

TEST(ThreadPool, EachPieceRunsOnce) {
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    ThreadPool::Lease lease(pool);
    for (int64_t count : {0, 1, 2, 3, 100, 10000}) {
      std::vector<std::atomic<int>> runs(count);
      pool.Run(count, [&](int64_t i) { runs[i].fetch_add(1); });
      for (const auto& run : runs)
        ASSERT_EQ(run.load(), 1) << threads << " threads, " << count << " pieces";
    }
  }
}

TEST(ThreadPool, FreeCoresAreTaken) {
  // Two pieces that each wait for the other end only if two threads run them.
  ThreadPool pool(2);
  ThreadPool::Lease lease(pool);
  absl::Notification started[2];
  pool.Run(2, [&](int64_t i) {
    started[i].Notify();
    started[1 - i].WaitForNotification();
  });
}

TEST(ThreadPool, ManyCallersEachSeeTheirOwnWorkDone) {
  constexpr int kCallers = 6;
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int c = 0; c < kCallers; ++c) {
    callers.emplace_back([&pool] {
      for (int round = 0; round < 300; ++round) {
        ThreadPool::Lease lease(pool);
        std::atomic<int64_t> sum{0};
        pool.Run(50, [&](int64_t i) { sum.fetch_add(i); });
        ASSERT_EQ(sum.load(), 49 * 50 / 2);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// The most that were between Enter and Leave at once.
class Crowd {
 public:
  void Enter() {
    const int now = inside_.fetch_add(1) + 1;
    int seen = most_.load();
    while (now > seen && !most_.compare_exchange_weak(seen, now)) {
    }
  }
  void Leave() { inside_.fetch_sub(1); }
  int most() const { return most_.load(); }

 private:
  std::atomic<int> inside_{0}, most_{0};
};

TEST(ThreadPool, NeverMoreThreadsThanCores) {
  constexpr int kThreads = 3, kCallers = 2;
  ThreadPool pool(kThreads);
  // Both callers have their cores before either computes, so one helper may run beside them at any time.
  std::atomic<int> leases{0};
  Crowd crowd;
  std::vector<std::thread> callers;
  for (int c = 0; c < kCallers; ++c) {
    callers.emplace_back([&] {
      ThreadPool::Lease lease(pool);
      leases.fetch_add(1);
      while (leases.load() < kCallers) std::this_thread::yield();
      for (int round = 0; round < 500; ++round) {
        pool.Run(20, [&](int64_t) {
          crowd.Enter();
          crowd.Leave();
        });
      }
      leases.fetch_add(1);
      while (leases.load() < 2 * kCallers) std::this_thread::yield();
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_LE(crowd.most(), kThreads);
}

TEST(ThreadPool, MoreCallersThanCoresTakeTurnsAndAllComeToAnEnd) {
  for (int threads : {1, 2}) {
    ThreadPool pool(threads);
    Crowd crowd;
    std::atomic<int> done{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 8; ++c) {
      callers.emplace_back([&] {
        for (int round = 0; round < 200; ++round) {
          ThreadPool::Lease lease(pool);
          crowd.Enter();
          pool.Run(4, [&](int64_t) { done.fetch_add(1); });
          crowd.Leave();
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    EXPECT_LE(crowd.most(), threads);
    EXPECT_EQ(done.load(), 8 * 200 * 4);
  }
}

TEST(ThreadPool, AHelperLeavesWhenAnotherCallerNeedsTheCore) {
  ThreadPool pool(2);
  ThreadPool::Lease lease(pool);
  const std::thread::id caller = std::this_thread::get_id();
  std::unique_ptr<ThreadPool::Lease> arrived;
  absl::Notification helper_came;
  std::atomic<int> by_helper{0};
  pool.Run(100, [&](int64_t) {
    if (std::this_thread::get_id() != caller) {
      // From inside its first piece the helper sees another caller take the core.
      if (by_helper.fetch_add(1) == 0) {
        arrived = std::make_unique<ThreadPool::Lease>(pool);
        helper_came.Notify();
      }
    } else {
      helper_came.WaitForNotification();
    }
  });
  EXPECT_EQ(by_helper.load(), 1);
}

}  // namespace
}  // namespace dmuon::kernels::cpu
