#include <sys/random.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/connection_impl.h"
#include "client/control_channel.h"
#include "client/dmuon/client.h"
#include "proto/wire/attach_frame.h"

namespace dmuon::client {
namespace {

absl::StatusOr<std::string> RandomUuid() {
  uint8_t b[16];
  if (getrandom(b, sizeof(b), 0) != sizeof(b)) return absl::InternalError("getrandom failed");
  b[6] = (b[6] & 0x0f) | 0x40;  // version 4
  b[8] = (b[8] & 0x3f) | 0x80;
  return absl::StrFormat("%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                         b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11],
                         b[12], b[13], b[14], b[15]);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Connection>> Connection::Open(const std::string& endpoint,
                                                             absl::Duration timeout) {
  auto impl = std::make_unique<Impl>();
  ASSIGN_OR_RETURN(impl->endpoint, ParseEndpoint(endpoint));
  ASSIGN_OR_RETURN(impl->client_uuid, RandomUuid());
  impl->text = endpoint;
  impl->owner = getpid();
  ASSIGN_OR_RETURN(impl->attach, AttachSocket::Open(impl->endpoint, impl->client_uuid, timeout));
  return std::unique_ptr<Connection>(new Connection(std::move(impl)));
}

Connection::Connection(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Connection::~Connection() {
  if (!impl_->ForkedChild()) return;
  // The channel's threads are the parent's: taking it down here could wait for them for ever.
  impl_->attach->Abandon();
  impl_.release();
}

const std::string& Connection::endpoint() const { return impl_->text; }
const std::string& Connection::daemon_version() const { return impl_->attach->daemon_version(); }
uint64_t Connection::grpc_calls() const {
  return impl_->grpc_calls.load(std::memory_order_relaxed);
}

void Connection::SetInterruptCheck(std::function<bool()> interrupted) {
  absl::MutexLock lock(&impl_->interrupt_mu);
  impl_->interrupted = std::move(interrupted);
}

bool Connection::Impl::ForkedChild() const { return getpid() != owner; }

absl::Status Connection::Impl::CheckProcess() const {
  if (!ForkedChild()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "this connection belongs to process %d and does not survive fork: process %d must open its "
      "own",
      owner, getpid()));
}

absl::Status Connection::Impl::Look() const {
  RETURN_IF_ERROR(attach->CheckAlive());
  std::function<bool()> check;
  {
    absl::MutexLock lock(&interrupt_mu);
    check = interrupted;
  }
  if (check && check()) return absl::CancelledError("interrupted");
  return absl::OkStatus();
}

void Connection::Impl::Authorize(grpc::ClientContext& context) const {
  context.AddMetadata(wire::kTokenMetadata, attach->token());
}

absl::StatusOr<v1::Trainer::Stub*> Connection::Impl::Trainer() {
  RETURN_IF_ERROR(CheckProcess());
  absl::MutexLock lock(&channel_mu);
  if (trainer == nullptr) {
    ASSIGN_OR_RETURN(auto channel, OpenControlChannel(endpoint));
    trainer = v1::Trainer::NewStub(channel);
  }
  grpc_calls.fetch_add(1, std::memory_order_relaxed);
  return trainer.get();
}

}  // namespace dmuon::client
