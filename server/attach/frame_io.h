// One frame in, one frame out, over a SOCK_SEQPACKET socket that the other side may abuse.
#ifndef DMUON_SERVER_ATTACH_FRAME_IO_H_
#define DMUON_SERVER_ATTACH_FRAME_IO_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/wire/attach_frame.h"

namespace dmuon::server {

struct Received {
  enum class Kind {
    kFrame,
    kNothing,    // no frame is there now
    kClosed,     // the other side has closed, or the socket is broken
    kMalformed,  // a packet that is no frame; `error` says why
  };
  Kind kind = Kind::kNothing;
  wire::AttachFrame frame;
  absl::Status error;
  int descriptors = 0;  // that came with it; they are closed already
};

// Does not block. Checks size, magic, version and that the texts end; nothing of what the fields mean.
Received ReceiveFrame(int socket);

// Does not block. `fd` >= 0 travels with the frame. Fails when the other side does not read.
absl::Status SendFrame(int socket, const wire::AttachFrame& frame, int fd = -1);

// An ERROR frame; a long message is cut.
wire::AttachFrame ErrorFrame(const absl::Status& status);

// Copies `text` into a field of `size` bytes, cut and NUL-terminated.
void SetText(char* field, size_t size, absl::string_view text);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_ATTACH_FRAME_IO_H_
