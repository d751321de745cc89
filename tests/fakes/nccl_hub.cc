#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>
#include <signal.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "tests/fakes/nccl_wire.h"

namespace dmuon_fakes {
namespace {

std::mutex g_disorder_mutex;
std::string g_disorder;

// To double and back: exact for what tests sum.
double Load(int type, const char* at) {
  const auto as = [at](auto value) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  switch (type) {
    case ncclFloat32: return as(float{});
    case ncclFloat64: return as(double{});
    case ncclFloat16: return __half2float(as(__half{}));
    case ncclBfloat16: return __bfloat162float(as(__nv_bfloat16{}));
    case ncclInt32: return as(int32_t{});
    case ncclUint32: return as(uint32_t{});
    case ncclInt64: return static_cast<double>(as(int64_t{}));
    case ncclUint64: return static_cast<double>(as(uint64_t{}));
    default: return as(uint8_t{});
  }
}

void Store(int type, char* at, double value) {
  const auto put = [at](auto v) { std::memcpy(at, &v, sizeof(v)); };
  switch (type) {
    case ncclFloat32: put(static_cast<float>(value)); break;
    case ncclFloat64: put(value); break;
    case ncclFloat16: put(__float2half_rn(static_cast<float>(value))); break;
    case ncclBfloat16: put(__float2bfloat16_rn(static_cast<float>(value))); break;
    case ncclInt32: put(static_cast<int32_t>(value)); break;
    case ncclUint32: put(static_cast<uint32_t>(value)); break;
    case ncclInt64: put(static_cast<int64_t>(value)); break;
    case ncclUint64: put(static_cast<uint64_t>(value)); break;
    default: put(static_cast<uint8_t>(value));
  }
}

double Reduced(int reduction, double a, double b) {
  switch (reduction) {
    case ncclProd: return a * b;
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return a + b;
  }
}

// One rank after the other into the first, each sum rounded to the type, as on a device.
std::vector<char> Reduce(const Frame& frame, const std::vector<std::vector<char>>& inputs) {
  std::vector<char> result = inputs[0];
  const size_t width = frame.count > 0 ? result.size() / frame.count : 1;
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    for (size_t at = 0; at < result.size(); at += width) {
      Store(frame.type, &result[at],
            Reduced(frame.reduction, Load(frame.type, &result[at]),
                    Load(frame.type, &inputs[rank][at])));
    }
  }
  return result;
}

class Hub : public std::enable_shared_from_this<Hub> {
 public:
  explicit Hub(int listener) : listener_(listener) {}
  void Serve();

 private:
  // A collective: what the first rank issued, and each rank's part.
  struct Operation {
    Frame first;
    std::map<int, uint64_t> sequence;
    std::map<int, std::vector<char>> data;
  };
  // Of p2p operations each direction has its own order.
  struct Direction {
    std::vector<std::vector<char>> sent;
    std::vector<uint64_t> awaited;  // the receiver's sequence
  };
  void Join(int fd, const Frame& frame);
  void Answer(int rank, uint64_t sequence, const std::vector<char>& bytes);
  void Issued(const Frame& frame);
  void Data(const Frame& frame, const std::vector<char>& payload);
  void Complete(Operation& operation);
  void Match(Direction& direction, int receiver);
  void Follow(int fd);

  const int listener_;
  std::mutex mutex_;
  int ranks_ = 0;
  bool started_ = false;
  std::map<int, int> fds_;  // by rank
  std::map<int, std::string> devices_;
  std::map<int, size_t> issued_;  // by rank: collectives so far
  std::vector<Operation> operations_;
  std::map<std::pair<int, int>, Direction> directions_;
  bool disordered_ = false;
};

// Until all ranks that came have left.
void Hub::Serve() {
  while (true) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) break;
    std::thread([self = shared_from_this(), fd] { self->Follow(fd); }).detach();
  }
  close(listener_);
}

void Hub::Follow(int fd) {
  Frame frame;
  std::vector<char> payload;
  while (Read(fd, frame, payload)) {
    std::lock_guard lock(mutex_);
    switch (frame.kind) {
      case Frame::Kind::kJoin: Join(fd, frame); break;
      case Frame::Kind::kIssued: Issued(frame); break;
      case Frame::Kind::kData: Data(frame, payload); break;
      default: break;
    }
  }
  // A rank that is gone: the others wait for ever, as with NCCL.
  std::lock_guard lock(mutex_);
  bool all_gone = !fds_.empty();
  for (auto& [rank, open] : fds_) {
    if (open == fd) open = -1;
    all_gone &= open < 0;
  }
  close(fd);
  if (all_gone) shutdown(listener_, SHUT_RDWR);
}

void Hub::Join(int fd, const Frame& frame) {
  Frame refusal;
  refusal.kind = Frame::Kind::kReady;
  refusal.error = ncclInvalidUsage;
  const std::string device(reinterpret_cast<const char*>(frame.uuid), sizeof(frame.uuid));
  if (ranks_ == 0) ranks_ = static_cast<int>(frame.count);
  const bool used =
      started_ || fds_.count(frame.rank) > 0 || ranks_ != static_cast<int>(frame.count);
  if (used) {
    std::fprintf(stderr, "fake_nccl: a unique id that is used again\n");
    (void)Write(fd, refusal, {});
    return;
  }
  bool duplicate = false;
  for (const auto& [rank, other] : devices_) duplicate |= other == device;
  fds_[frame.rank] = fd;
  devices_[frame.rank] = device;
  if (static_cast<int>(fds_.size()) < ranks_ && !duplicate) return;
  started_ = true;
  if (duplicate) std::fprintf(stderr, "fake_nccl: duplicate GPU: two ranks on one device\n");
  refusal.error = duplicate ? ncclInvalidUsage : ncclSuccess;
  for (const auto& [rank, open] : fds_) (void)Write(open, refusal, {});
}

void Hub::Answer(int rank, uint64_t sequence, const std::vector<char>& bytes) {
  Frame frame;
  frame.kind = Frame::Kind::kResult;
  frame.sequence = sequence;
  if (fds_[rank] >= 0) (void)Write(fds_[rank], frame, bytes);
}

bool Same(const Frame& a, const Frame& b) {
  return a.op == b.op && a.count == b.count && a.type == b.type && a.root == b.root &&
         a.reduction == b.reduction;
}

void Hub::Issued(const Frame& frame) {
  if (frame.op == Op::kSend || frame.op == Op::kReceive) return;
  const size_t position = issued_[frame.rank]++;
  if (position == operations_.size()) operations_.push_back({frame, {}, {}});
  Operation& operation = operations_[position];
  operation.sequence[frame.rank] = frame.sequence;
  const Frame& first = operation.first;
  if (Same(first, frame)) return;
  disordered_ = true;
  char line[256];
  std::snprintf(
      line, sizeof(line),
      "operation %zu: rank %d issued %s of %lu, root %d; rank %d issued %s of %lu, root %d\n",
      position, first.rank, Name(first.op), first.count, first.root, frame.rank, Name(frame.op),
      frame.count, frame.root);
  std::fprintf(stderr, "fake_nccl: %s", line);
  std::lock_guard lock(g_disorder_mutex);
  g_disorder += line;
}

void Hub::Data(const Frame& frame, const std::vector<char>& payload) {
  if (frame.op == Op::kSend) {
    Direction& direction = directions_[{frame.rank, frame.root}];
    direction.sent.push_back(payload);
    Answer(frame.rank, frame.sequence, {});
    Match(direction, frame.root);
    return;
  }
  if (frame.op == Op::kReceive) {
    Direction& direction = directions_[{frame.root, frame.rank}];
    direction.awaited.push_back(frame.sequence);
    Match(direction, frame.rank);
    return;
  }
  if (disordered_) return;  // never completes
  for (auto it = operations_.rbegin(); it != operations_.rend(); ++it) {
    Operation& operation = *it;
    const auto mine = operation.sequence.find(frame.rank);
    if (mine == operation.sequence.end() || mine->second != frame.sequence) continue;
    operation.data[frame.rank] = payload;
    if (static_cast<int>(operation.data.size()) == ranks_) Complete(operation);
    return;
  }
}

void Hub::Match(Direction& direction, int receiver) {
  while (!direction.sent.empty() && !direction.awaited.empty()) {
    Answer(receiver, direction.awaited.front(), direction.sent.front());
    direction.sent.erase(direction.sent.begin());
    direction.awaited.erase(direction.awaited.begin());
  }
}

void Hub::Complete(Operation& operation) {
  const Frame& frame = operation.first;
  std::vector<std::vector<char>> inputs;
  for (auto& [rank, data] : operation.data) inputs.push_back(std::move(data));
  std::vector<char> result;
  if (frame.op == Op::kAllGather) {
    for (const auto& input : inputs) result.insert(result.end(), input.begin(), input.end());
  } else if (frame.op == Op::kBroadcast) {
    result = inputs[static_cast<size_t>(frame.root)];
  } else {
    result = Reduce(frame, inputs);
  }
  const auto share = static_cast<std::ptrdiff_t>(result.size() / static_cast<size_t>(ranks_));
  for (const auto& [rank, sequence] : operation.sequence) {
    if (frame.op == Op::kReduceScatter) {
      const auto begin = result.begin() + share * rank;
      Answer(rank, sequence, {begin, begin + share});
    } else {
      Answer(rank, sequence,
             frame.op == Op::kReduce && rank != frame.root ? std::vector<char>() : result);
    }
  }
}

}  // namespace

const char* Name(Op op) {
  static constexpr const char* kNames[] = {"all-reduce",     "reduce", "broadcast", "all-gather",
                                           "reduce-scatter", "send",   "receive"};
  return kNames[static_cast<size_t>(op)];
}

int OpenSocket(const std::string& name, bool server) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(),
              std::min(name.size(), sizeof(address.sun_path) - 2));
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  const bool open = server ? bind(fd, generic, sizeof(address)) == 0 && listen(fd, 64) == 0
                           : connect(fd, generic, sizeof(address)) == 0;
  if (open) return fd;
  close(fd);
  return -1;
}

std::string StartHub() {
  std::random_device random;
  const std::string name =
      "dmuon_fake_nccl/" + std::to_string(getpid()) + "/" + std::to_string(random());
  const int listener = OpenSocket(name, true);
  if (listener < 0) return "";
  std::thread([hub = std::make_shared<Hub>(listener)] { hub->Serve(); }).detach();
  return name;
}

bool HubIsOver(const std::string& name) {
  int pid = 0;
  return std::sscanf(name.c_str(), "dmuon_fake_nccl/%d/", &pid) == 1 && kill(pid, 0) == 0;
}

std::string Disorder() {
  std::lock_guard lock(g_disorder_mutex);
  return g_disorder;
}

}  // namespace dmuon_fakes
