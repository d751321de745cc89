// What ranks and hub of the NCCL stand-in send each other.
#ifndef DMUON_TESTS_FAKES_NCCL_WIRE_H_
#define DMUON_TESTS_FAKES_NCCL_WIRE_H_

#include <sys/socket.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace dmuon_fakes {

enum class Op : uint32_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kSend,
  kReceive
};
const char* Name(Op op);

struct Frame {
  enum class Kind : uint32_t {
    kJoin,    // rank -> hub: `count` ranks, `uuid` of the device
    kReady,   // hub -> rank: all are there; or `error`
    kIssued,  // rank -> hub: the host has issued operation `sequence`
    kData,    // rank -> hub: and its stream has come to it; bytes follow
    kResult,  // hub -> rank: what to write; bytes follow
  };
  Kind kind = Kind::kJoin;
  int32_t rank = 0;
  uint64_t sequence = 0;
  Op op = Op::kAllReduce;
  int32_t type = 0;
  int32_t reduction = 0;
  int32_t root = 0;  // of kSend and kReceive: the other rank
  uint64_t count = 0;
  int32_t error = 0;
  unsigned char uuid[16] = {};
  uint64_t bytes = 0;
};

inline bool SendAll(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

inline bool ReceiveAll(int fd, void* data, size_t bytes) {
  return bytes == 0 || recv(fd, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

inline bool Write(int fd, Frame frame, const std::vector<char>& payload) {
  frame.bytes = payload.size();
  return SendAll(fd, &frame, sizeof(frame)) && SendAll(fd, payload.data(), payload.size());
}

inline bool Read(int fd, Frame& frame, std::vector<char>& payload) {
  if (!ReceiveAll(fd, &frame, sizeof(frame))) return false;
  payload.resize(frame.bytes);
  return ReceiveAll(fd, payload.data(), payload.size());
}

// Starts a hub for one communicator; returns the name of its abstract socket.
std::string StartHub();
// Whether a hub that cannot be reached has ended while its process lives: its id was used.
bool HubIsOver(const std::string& name);
// What hubs of this process found out of order.
std::string Disorder();
// An abstract socket of this name: listening (`server`) or connected; -1 when there is none.
int OpenSocket(const std::string& name, bool server);

}  // namespace dmuon_fakes

#endif  // DMUON_TESTS_FAKES_NCCL_WIRE_H_
