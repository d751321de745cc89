// Futex on a word that two processes share.
#ifndef DMUON_PROTO_WIRE_FUTEX_H_
#define DMUON_PROTO_WIRE_FUTEX_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace dmuon::wire {

// Returns when `word` differs from `expected`, on a wake, on a signal, or after `timeout`. Look again after it.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, absl::Duration timeout);
void FutexWakeAll(const std::atomic<uint32_t>& word);

}  // namespace dmuon::wire

#endif  // DMUON_PROTO_WIRE_FUTEX_H_
