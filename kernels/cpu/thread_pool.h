// The cores of a daemon, shared by all workers that compute at once.
//
// A worker that calls is itself one of the cores; when as many call as there are cores, the next one waits until one of
// them is done. Helpers join only while cores are free, and leave between two pieces of work when another worker
// arrives. So there are never more threads running than cores given, but for the length of such a piece.
#ifndef DMUON_KERNELS_CPU_THREAD_POOL_H_
#define DMUON_KERNELS_CPU_THREAD_POOL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace dmuon::kernels::cpu {

class ThreadPool {
 public:
  // threads >= 1, the callers included: threads - 1 helpers are started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Held by a worker for as long as it computes: it counts as one core. REQUIRES: a thread holds one at a time, and waits
  // for no other caller while it does.
  class Lease {
   public:
    explicit Lease(ThreadPool& pool);  // waits for a core
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

   private:
    ThreadPool& pool_;
  };

  // Calls piece(i) once for each i in [0, count), here and on free helpers, and returns when all are done. Allocates
  // nothing. REQUIRES: the caller holds a Lease, and is not inside a piece.
  void Run(int64_t count, absl::FunctionRef<void(int64_t)> piece);

 private:
  // The work of one caller that helpers may join.
  struct Region {
    std::atomic<int64_t> next{0};
    std::atomic<int> helpers{0};
    int64_t count = 0;
    const absl::FunctionRef<void(int64_t)>* piece = nullptr;
    bool open = false;  // guarded by mutex_
    bool used = false;  // guarded by mutex_
  };
  static constexpr int kMaxRegions = 64;

  void HelperLoop();
  Region* Join();
  void Leave(Region* region);
  void Work(Region& region, bool helper);
  void Wake();

  const int threads_;
  std::atomic<int> callers_{0};     // leases, at most threads_
  std::atomic<int> waiting_{0};     // for a lease
  std::atomic<int> active_{0};      // leases and busy helpers
  std::atomic<uint32_t> epoch_{0};  // changes when there may be something to join
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  absl::Mutex mutex_;
  std::array<Region, kMaxRegions> regions_;
  std::vector<std::thread> helpers_;
};

}  // namespace dmuon::kernels::cpu

#endif  // DMUON_KERNELS_CPU_THREAD_POOL_H_
