// The frames of attach.sock (SOCK_SEQPACKET): who the trainer is, its token, and file descriptors for its arenas.
//
// HELLO -> WELCOME{token}. Then, once the session is configured, FETCH{session, rank, arena} -> ARENA{bytes} with one
// descriptor (SCM_RIGHTS). Anything else is answered by ERROR{code, text}; descriptors that a trainer sends are closed.
// The connection stays open for the life of the attachment, but its end is not the death of the trainer: the pidfd is.
#ifndef DMUON_PROTO_WIRE_ATTACH_FRAME_H_
#define DMUON_PROTO_WIRE_ATTACH_FRAME_H_

#include <cstdint>
#include <type_traits>

namespace dmuon::wire {

inline constexpr uint32_t kAttachMagic = 0x54414d44;  // "DMAT"
inline constexpr uint32_t kAttachVersion = 1;
inline constexpr int kTokenBytes = 16;
// gRPC metadata key of the token, as 32 hex digits.
inline constexpr char kTokenMetadata[] = "dmuon-token";

enum class AttachType : uint32_t {
  kUnspecified = 0,  // refused
  kHello = 1,
  kWelcome = 2,
  kFetch = 3,
  kArena = 4,
  kError = 5,
};

enum class ArenaKind : uint32_t {
  kUnspecified = 0,  // refused
  kControl = 1,
  kGrad = 2,
  kWeight = 3,
};

struct AttachFrame {
  uint32_t magic = kAttachMagic;
  uint32_t version = kAttachVersion;
  AttachType type = AttachType::kUnspecified;
  uint32_t code = 0;                          // ERROR: absl::StatusCode
  uint64_t session = 0;                       // FETCH, ARENA
  uint32_t rank = 0;                          // FETCH, ARENA
  ArenaKind arena = ArenaKind::kUnspecified;  // FETCH, ARENA
  uint64_t bytes = 0;                         // ARENA: size of the mapping
  uint8_t token[kTokenBytes] = {};            // WELCOME
  char client[40] = {};                       // HELLO: client UUID as text, NUL-terminated
  char text[416] = {};  // ERROR: the reason, NUL-terminated. WELCOME: daemon version
};
static_assert(sizeof(AttachFrame) == 512 && std::is_trivially_copyable_v<AttachFrame>);

}  // namespace dmuon::wire

#endif  // DMUON_PROTO_WIRE_ATTACH_FRAME_H_
