// Tells ThreadSanitizer what absl::Mutex orders. The packaged Abseil is not instrumented, so without this everything that
// a Mutex guards looks like a race. Linked into the tests of the tsan preset alone; what is defined here takes the place
// of the library's own, and calls it.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>

#include "absl/synchronization/mutex.h"

namespace {

// The library's definition, by its mangled name.
template <typename Function>
Function* Real(const char* name) {
  void* symbol = dlsym(RTLD_NEXT, name);
  if (symbol == nullptr) {
    fprintf(stderr, "tsan_absl_mutex.cc: no %s in the Abseil that is linked\n", name);
    abort();
  }
  return reinterpret_cast<Function*>(symbol);
}

// A waiter's condition is looked at under the lock, by whoever holds it just then: the waiter, or one that unlocks.
struct Watched {
  absl::Mutex* mutex;
  const absl::Condition* condition;
};
bool Look(Watched* watched) {
  __tsan_acquire(watched->mutex);
  const bool met = watched->condition->Eval();
  __tsan_release(watched->mutex);
  return met;
}

#define ABSL_MUTEX(rest) "_ZN4absl7debian35Mutex" rest

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static auto* const real = Real<void(Mutex*)>(ABSL_MUTEX("4LockEv"));
  real(this);
  __tsan_acquire(this);
}

bool Mutex::TryLock() {
  static auto* const real = Real<bool(Mutex*)>(ABSL_MUTEX("7TryLockEv"));
  const bool locked = real(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::Unlock() {
  static auto* const real = Real<void(Mutex*)>(ABSL_MUTEX("6UnlockEv"));
  __tsan_release(this);
  real(this);
}

void Mutex::ReaderLock() {
  static auto* const real = Real<void(Mutex*)>(ABSL_MUTEX("10ReaderLockEv"));
  real(this);
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  static auto* const real = Real<void(Mutex*)>(ABSL_MUTEX("12ReaderUnlockEv"));
  __tsan_release(this);
  real(this);
}

void Mutex::Await(const Condition& condition) {
  static auto* const real =
      Real<void(Mutex*, const Condition&)>(ABSL_MUTEX("5AwaitERKNS0_9ConditionE"));
  Watched watched{this, &condition};
  __tsan_release(this);
  real(this, Condition(&Look, &watched));
  __tsan_acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static auto* const real = Real<bool(Mutex*, const Condition&, Duration)>(
      ABSL_MUTEX("16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE"));
  Watched watched{this, &condition};
  __tsan_release(this);
  const bool met = real(this, Condition(&Look, &watched), timeout);
  __tsan_acquire(this);
  return met;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static auto* const real = Real<bool(Mutex*, const Condition&, Time)>(
      ABSL_MUTEX("17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE"));
  Watched watched{this, &condition};
  __tsan_release(this);
  const bool met = real(this, Condition(&Look, &watched), deadline);
  __tsan_acquire(this);
  return met;
}

void CondVar::Wait(Mutex* mutex) {
  static auto* const real =
      Real<void(CondVar*, Mutex*)>("_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE");
  __tsan_release(mutex);
  real(this, mutex);
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static auto* const real = Real<bool(CondVar*, Mutex*, Duration)>(
      "_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  __tsan_release(mutex);
  const bool expired = real(this, mutex, timeout);
  __tsan_acquire(mutex);
  return expired;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static auto* const real = Real<bool(CondVar*, Mutex*, Time)>(
      "_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  __tsan_release(mutex);
  const bool expired = real(this, mutex, deadline);
  __tsan_acquire(mutex);
  return expired;
}

ABSL_NAMESPACE_END
}  // namespace absl
