// Waiting for a word of the control page: spin briefly, then sleep on the doorbell, and look around
// at times.
#ifndef DMUON_CLIENT_PAGE_WAIT_H_
#define DMUON_CLIENT_PAGE_WAIT_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/connection_impl.h"
#include "proto/wire/control_page.h"

namespace dmuon::client {

// What the page says about its session: OK, or why nothing will be answered any more.
absl::Status PageStatus(const wire::ControlPage& page);

// Returns OK once `done` is true, whatever else happened. UNAVAILABLE: the daemon died, or the
// session failed or was closed under us; CANCELLED: interrupted. `done` reads words that the daemon
// writes before it rings; where it does
// not ring, every `tick`. Allocates nothing.
absl::Status WaitOnPage(const wire::ControlPage& page, const Connection::Impl& connection,
                        absl::FunctionRef<bool()> done, absl::Duration tick = kLookEvery);

}  // namespace dmuon::client

#endif  // DMUON_CLIENT_PAGE_WAIT_H_
