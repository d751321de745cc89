#include "tests/benchmark/allocation_count.h"

#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace {

std::atomic<dmuon::bench::AllocationCount*> g_count{nullptr};
pid_t g_process = 0;

void Count() {
  dmuon::bench::AllocationCount* const count = g_count.load(std::memory_order_relaxed);
  if (count == nullptr || !count->counting.load(std::memory_order_relaxed) || getpid() != g_process)
    return;
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));
  ++count->on_all;
  if (strncmp(name, "slot-", 5) == 0) ++count->on_workers;
}

}  // namespace

namespace dmuon::bench {

void CountAllocationsIn(AllocationCount* count) {
  g_process = getpid();
  g_count = count;
}

}  // namespace dmuon::bench

// glibc's own, under the names that it keeps for programs that replace malloc.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  Count();
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  Count();
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  Count();
  return __libc_realloc(old, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  Count();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  Count();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  Count();
  *memory = __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}
}
