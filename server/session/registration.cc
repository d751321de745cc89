#include "server/session/registration.h"

#include <sys/random.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kNonceBytes = 16;

const char* NameOf(wire::ArenaKind kind) {
  switch (kind) {
    case wire::ArenaKind::kControl: return "control";
    case wire::ArenaKind::kGrad: return "grad";
    case wire::ArenaKind::kWeight: return "weight";
    case wire::ArenaKind::kUnspecified: break;
  }
  return "?";
}

absl::Status Wrong(const Buffer& b, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("buffer '", NameOf(b.kind), "': ", what));
}

absl::StatusOr<const Buffer*> TheOnly(const std::vector<Buffer>& buffers, wire::ArenaKind kind) {
  const auto is = [kind](const Buffer& b) { return b.kind == kind; };
  const auto count = std::count_if(buffers.begin(), buffers.end(), is);
  if (count != 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("buffer '%s': expected once, got %d times", NameOf(kind), count));
  }
  return &*std::find_if(buffers.begin(), buffers.end(), is);
}

absl::Status CheckSealed(const Buffer& b, uint64_t bytes) {
  if (!b.ipc_handle.empty() || !b.device.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("buffer '", NameOf(b.kind),
                     "': expected the arena of the attach socket, given a handle of "
                     "device memory"));
  }
  if (b.offset != 0 || b.size != bytes) {
    return Wrong(b, absl::StrFormat("expected offset 0 and %d bytes, got offset %d and %d bytes",
                                    bytes, b.offset, b.size));
  }
  return absl::OkStatus();
}

absl::Status CheckHandle(const Buffer& b, uint64_t bytes, const std::string& device) {
  if (b.ipc_handle.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("buffer '", NameOf(b.kind), "': ipc_handle: expected a handle of memory on ",
                     device, ", as this daemon computes there; given none"));
  }
  if (b.device != device) {
    return Wrong(b, absl::StrCat("gpu_uuid: expected ", device, ", as in ConfigureGroups, given '",
                                 b.device, "'"));
  }
  if (b.size != bytes)
    return Wrong(b, absl::StrFormat("size: expected %d bytes, got %d", bytes, b.size));
  if (b.offset % kAlignment != 0) {
    return Wrong(
        b, absl::StrFormat("offset: expected a multiple of %d, got %d", kAlignment, b.offset));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<kernels::ImportedMemory>> ImportOne(kernels::Backend& backend,
                                                                   const Registration& r,
                                                                   wire::ArenaKind kind) {
  ASSIGN_OR_RETURN(const Buffer* b, TheOnly(r.buffers, kind));
  auto imported = backend.Import({.handle = b->ipc_handle,
                                  .device = b->device,
                                  .offset = b->offset,
                                  .size = b->size,
                                  .versions = r.versions});
  if (!imported.ok())
    return Annotate(imported.status(), absl::StrCat("buffer '", NameOf(kind), "'"));
  return imported;
}

absl::StatusOr<std::string> Nonce() {
  std::string nonce(kNonceBytes, '\0');
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size()))
    return absl::InternalError("getrandom failed");
  return nonce;
}

}  // namespace

absl::Status CheckBuffers(const std::vector<Buffer>& buffers, const ExpectedBuffers& expected) {
  ASSIGN_OR_RETURN(const Buffer* control, TheOnly(buffers, wire::ArenaKind::kControl));
  ASSIGN_OR_RETURN(const Buffer* grad, TheOnly(buffers, wire::ArenaKind::kGrad));
  ASSIGN_OR_RETURN(const Buffer* weight, TheOnly(buffers, wire::ArenaKind::kWeight));
  if (buffers.size() != 3) {
    return absl::InvalidArgumentError(
        absl::StrFormat("buffers: expected 3, got %d", buffers.size()));
  }
  RETURN_IF_ERROR(CheckSealed(*control, expected.control_bytes));
  if (!expected.by_handle) {
    RETURN_IF_ERROR(CheckSealed(*grad, expected.grad_bytes));
    return CheckSealed(*weight, expected.weight_bytes);
  }
  RETURN_IF_ERROR(CheckHandle(*grad, expected.grad_bytes, expected.device));
  RETURN_IF_ERROR(CheckHandle(*weight, expected.weight_bytes, expected.device));
  if (grad->ipc_handle == weight->ipc_handle) {
    return Wrong(*weight, "ipc_handle: expected an allocation of its own, given that of 'grad'");
  }
  return absl::OkStatus();
}

absl::StatusOr<ImportedArenas> ImportedArenas::Import(kernels::Backend& backend,
                                                      const Registration& registration) {
  ImportedArenas arenas;
  ASSIGN_OR_RETURN(arenas.grad_nonce_, Nonce());
  ASSIGN_OR_RETURN(arenas.weight_nonce_, Nonce());
  ASSIGN_OR_RETURN(arenas.grad, ImportOne(backend, registration, wire::ArenaKind::kGrad));
  ASSIGN_OR_RETURN(arenas.weight, ImportOne(backend, registration, wire::ArenaKind::kWeight));
  return arenas;
}

// At the end, so that all of the arena is known to be there. An arena is at least a page.
std::vector<Probe> ImportedArenas::probes() const {
  return {{wire::ArenaKind::kGrad, grad->size() - kNonceBytes, kNonceBytes},
          {wire::ArenaKind::kWeight, weight->size() - kNonceBytes, kNonceBytes}};
}

absl::Status ImportedArenas::WriteProbes(kernels::Backend& backend, kernels::Stream stream) const {
  backend.CopyFromHost(stream, grad->data() + grad->size() - kNonceBytes, grad_nonce_.data(),
                       kNonceBytes);
  backend.CopyFromHost(stream, weight->data() + weight->size() - kNonceBytes, weight_nonce_.data(),
                       kNonceBytes);
  return Annotate(backend.Synchronize(stream), "writing into the trainer's arenas");
}

absl::Status ImportedArenas::CheckFound(const std::vector<std::string>& found) const {
  if (found.size() != 2)
    return absl::InvalidArgumentError(absl::StrFormat("found: expected 2, got %d", found.size()));
  for (const auto& [name, expected, given] : {std::tuple("grad", &grad_nonce_, &found[0]),
                                              std::tuple("weight", &weight_nonce_, &found[1])}) {
    if (*expected == *given) continue;
    return absl::FailedPreconditionError(absl::StrFormat(
        "buffer '%s': the trainer did not find in it what the daemon has written: the two do not "
        "see the same memory",
        name));
  }
  return absl::OkStatus();
}

}  // namespace dmuon::server
