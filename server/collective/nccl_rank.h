// One rank of this process in a NcclCommunicator: its NCCL communicator, its stream, and the rings of exchanges under way.
#ifndef DMUON_SERVER_COLLECTIVE_NCCL_RANK_H_
#define DMUON_SERVER_COLLECTIVE_NCCL_RANK_H_

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/collective/device_communicator.h"

namespace dmuon::server {

struct NcclRank {
  NcclRank(int rank_number, int ordinal, size_t ring);
  ~NcclRank();  // REQUIRES: `communicator` and `stream` are closed
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  // Makes stream and events.
  absl::Status Prepare();
  // Enqueues this rank's part. REQUIRES: its device is current, inside a group of NCCL.
  ncclResult_t Issue(const Exchange& exchange, int ranks) const;

  const int rank, device;
  // Of the issuing thread.
  ncclComm_t communicator = nullptr;
  cudaStream_t stream = nullptr;
  uint64_t digest = 0;  // of the rank's own thread: of what it has submitted
  // Of the rank's own thread until the exchange is submitted, then of the issuing thread. Exchange n is at n % size.
  std::vector<Exchange> exchanges;
  std::vector<cudaEvent_t> submitted_at;  // what was on the rank's stream before it
  std::vector<cudaEvent_t> ended_at;
  std::atomic<uint64_t> submitted{0}, ended{0};

 private:
  ncclResult_t Gather(const Exchange& exchange, int ranks) const;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_NCCL_RANK_H_
