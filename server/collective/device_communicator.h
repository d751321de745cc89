// How devices that cannot read each other's memory exchange tensors: NCCL behind an interface that needs none of its headers.
// The seam is for slots of one daemon without peer access, and for slots of several daemons alike: those only agree on the id
// of an epoch first, and tell each other when one aborts.
//
// One communicator is one epoch. It is formed once, and once aborted it stays so: the next one has a new id.
#ifndef DMUON_SERVER_COLLECTIVE_DEVICE_COMMUNICATOR_H_
#define DMUON_SERVER_COLLECTIVE_DEVICE_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/ops/backend.h"
#include "kernels/ops/dtype.h"

namespace dmuon::server {

enum class Movement {
  kSum,        // to[i] = sum over ranks of from[i], on all ranks
  kSumTo,      // the same, on the root alone
  kBroadcast,  // to[i] = the root's from[i], on all ranks
  // The root's to = the from of rank 0, then of rank 1, and so on: what a root that is to have the same bits as one that
  // reads the others' memory sums by itself, in rank order.
  kGather,
  kSend,  // the peer's to = the root's from
};

// All ranks submit the same, in the same order, but for the addresses. Memory is this process's own on the rank's device,
// never an arena: a trainer may die while it is read.
struct Exchange {
  Movement movement = Movement::kSum;
  int root = 0;
  int peer = 0;  // of kSend, and not the root
  Dtype dtype = Dtype::kF32;
  int64_t count = 0;
  const void* from = nullptr;  // not read on others than the root of kBroadcast and kSend
  // Not written on others than the root of kSumTo and kGather, and the peer of kSend.
  void* to = nullptr;
};

class DeviceCommunicator {
 public:
  enum class State { kForming, kReady, kAborted };

  virtual ~DeviceCommunicator() = default;  // ends what is under way
  virtual State state() const = 0;
  // Whether it ever was kReady: what was aborted before that may not form the next time either.
  virtual bool formed() const = 0;
  // Why it was aborted: the first cause. OK while it is not.
  virtual absl::Status cause() const = 0;

  // Enqueues after what is on `stream` of this local rank now; from the rank's own thread, and never waits. The number of
  // the exchange, from 1. FAILED_PRECONDITION: not formed yet, or more under way than Options said. Aborted: its cause.
  virtual absl::StatusOr<uint64_t> Submit(int rank, kernels::Stream stream,
                                          const Exchange& exchange) = 0;
  // Whether the rank's part of it has ended. Never waits. Aborted: its cause.
  virtual absl::StatusOr<bool> Ended(int rank, uint64_t number) const = 0;
  // Of all exchanges that this local rank has submitted, in order: ranks that differ would hang. From the rank's own thread.
  virtual uint64_t digest(int rank) const = 0;

  // Ends the epoch on this side: every exchange ends with `cause`. By all: on_abort tells the others. Never waits.
  virtual void Abort(const absl::Status& cause) = 0;
};

struct DeviceCommunicatorOptions {
  struct Local {
    int rank = 0;
    int device = 0;  // its ordinal in this process
  };

  uint64_t epoch = 1;
  std::string id;                    // from NewId of one of the daemons, never of another epoch
  std::vector<std::string> devices;  // by rank: the UUID of its GPU, which no other rank has
  std::vector<Local> local;          // the ranks of this process
  int most_under_way = 64;           // exchanges of a rank that have not ended
  absl::Duration join_timeout = absl::Seconds(60);
  absl::Duration exchange_timeout = absl::Seconds(60);
  absl::Duration abort_timeout = absl::Seconds(10);
  // Called once, from a thread of the communicator, before it aborts: tell the other daemons. May call nothing of it.
  std::function<void(const absl::Status& cause)> on_abort;
  // A call of the library did not return in time, so nothing here can be trusted to end. Null: ends the process with 70.
  std::function<void(const absl::Status& what)> on_stuck;
};

// What the library that holds NCCL offers; owned by it, and there as long as the process.
class DeviceCommunicators {
 public:
  virtual absl::StatusOr<std::string> NewId() = 0;
  // INVALID_ARGUMENT: two ranks on one device, which NCCL refuses late and without their names. Forms in the background.
  virtual absl::StatusOr<std::unique_ptr<DeviceCommunicator>> Create(
      const DeviceCommunicatorOptions& options) = 0;
  virtual std::string description() const = 0;  // "NCCL 2.28.9"

 protected:
  ~DeviceCommunicators() = default;
};

// From libdmuon_nccl.so, found as the CUDA backend is. UNAVAILABLE, and why: no such file, or a library that it needs is
// missing. FAILED_PRECONDITION: a library of another build.
absl::StatusOr<DeviceCommunicators*> LoadDeviceCommunicators();

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_DEVICE_COMMUNICATOR_H_
