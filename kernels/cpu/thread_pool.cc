#include "kernels/cpu/thread_pool.h"

#include <pthread.h>

#include <algorithm>

namespace dmuon::kernels::cpu {
namespace {

// Between two products of one iteration a helper spins rather than sleeps: some ten microseconds, then it sleeps.
constexpr int kSpins = 4000;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(std::max(threads, 1)) {
  for (int i = 1; i < threads_; ++i) {
    helpers_.emplace_back([this] { HelperLoop(); });
    pthread_setname_np(helpers_.back().native_handle(), "dmuon-kernels");
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  Wake();
  for (std::thread& helper : helpers_) helper.join();
}

ThreadPool::Lease::Lease(ThreadPool& pool) : pool_(pool) {
  // Who comes first computes on: taking turns after each small operation would cost more than it is long.
  for (int callers = pool_.callers_.load();;) {
    if (callers < pool_.threads_) {
      if (pool_.callers_.compare_exchange_weak(callers, callers + 1)) break;
      continue;
    }
    pool_.waiting_.fetch_add(1);
    pool_.callers_.wait(callers);
    pool_.waiting_.fetch_sub(1);
    callers = pool_.callers_.load();
  }
  pool_.active_.fetch_add(1);
}

ThreadPool::Lease::~Lease() {
  pool_.callers_.fetch_sub(1);
  if (pool_.waiting_.load() > 0) pool_.callers_.notify_one();
  // A core came free: someone else's region may take it.
  pool_.active_.fetch_sub(1);
  if (pool_.active_.load() > 0) pool_.Wake();
}

void ThreadPool::Wake() {
  epoch_.fetch_add(1);
  if (sleepers_.load() > 0) epoch_.notify_all();
}

void ThreadPool::Run(int64_t count, absl::FunctionRef<void(int64_t)> piece) {
  Region* region = nullptr;
  if (count > 1 && threads_ > 1) {
    absl::MutexLock lock(&mutex_);
    for (Region& candidate : regions_) {
      if (candidate.used) continue;
      region = &candidate;
      region->next.store(0);
      region->count = count;
      region->piece = &piece;
      region->open = region->used = true;
      break;
    }
  }
  if (region == nullptr) {
    for (int64_t i = 0; i < count; ++i) piece(i);
    return;
  }
  if (active_.load() < threads_) Wake();
  Work(*region, /*helper=*/false);
  {
    absl::MutexLock lock(&mutex_);
    region->open = false;  // nobody joins from here on
  }
  int helpers;
  for (int spin = 0; (helpers = region->helpers.load(std::memory_order_acquire)) > 0;) {
    if (++spin < kSpins) {
      Pause();
    } else {
      region->helpers.wait(helpers);
    }
  }
  absl::MutexLock lock(&mutex_);
  region->used = false;
}

void ThreadPool::Work(Region& region, bool helper) {
  while (!helper || active_.load(std::memory_order_relaxed) <= threads_) {
    const int64_t i = region.next.fetch_add(1);
    if (i >= region.count) return;
    (*region.piece)(i);
  }
}

ThreadPool::Region* ThreadPool::Join() {
  absl::MutexLock lock(&mutex_);
  if (active_.load() >= threads_) return nullptr;
  Region* best = nullptr;
  for (Region& region : regions_) {
    if (!region.open || region.next.load() >= region.count) continue;
    if (best == nullptr || region.helpers.load() < best->helpers.load()) best = &region;
  }
  if (best == nullptr) return nullptr;
  active_.fetch_add(1);
  best->helpers.fetch_add(1);
  return best;
}

void ThreadPool::Leave(Region* region) {
  active_.fetch_sub(1);
  if (region->helpers.fetch_sub(1, std::memory_order_release) == 1) region->helpers.notify_all();
}

void ThreadPool::HelperLoop() {
  while (!stop_.load()) {
    const uint32_t seen = epoch_.load();
    if (Region* region = Join()) {
      Work(*region, /*helper=*/true);
      Leave(region);
      continue;
    }
    for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_relaxed) == seen; ++spin)
      Pause();
    sleepers_.fetch_add(1);
    if (!stop_.load()) epoch_.wait(seen);
    sleepers_.fetch_sub(1);
  }
}

}  // namespace dmuon::kernels::cpu
