#include "server/collective/nccl_rank.h"

#include "base/status_macros.h"
#include "kernels/cuda/status.h"

namespace dmuon::server {
namespace {

using cuda::ToStatus;

ncclDataType_t NcclType(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return ncclFloat32;
    case Dtype::kBF16: return ncclBfloat16;
    case Dtype::kF16: return ncclFloat16;
  }
  return ncclFloat32;
}

}  // namespace

NcclRank::NcclRank(int rank_number, int ordinal, size_t ring)
    : rank(rank_number),
      device(ordinal),
      exchanges(ring),
      submitted_at(ring, nullptr),
      ended_at(ring, nullptr) {}

NcclRank::~NcclRank() {
  for (const auto* ring : {&submitted_at, &ended_at}) {
    for (cudaEvent_t event : *ring) {
      if (event != nullptr) (void)cudaEventDestroy(event);
    }
  }
}

absl::Status NcclRank::Prepare() {
  RETURN_IF_ERROR(ToStatus(cudaSetDevice(device), "selecting the device"));
  int least = 0, greatest = 0;
  RETURN_IF_ERROR(
      ToStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading stream priorities"));
  RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                           "creating a stream"));
  for (auto* ring : {&submitted_at, &ended_at}) {
    for (cudaEvent_t& event : *ring)
      RETURN_IF_ERROR(
          ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event"));
  }
  return absl::OkStatus();
}

ncclResult_t NcclRank::Issue(const Exchange& e, int ranks) const {
  const auto count = static_cast<size_t>(e.count);
  const ncclDataType_t type = NcclType(e.dtype);
  switch (e.movement) {
    case Movement::kSum:
      return ncclAllReduce(e.from, e.to, count, type, ncclSum, communicator, stream);
    case Movement::kSumTo:
      return ncclReduce(e.from, e.to, count, type, ncclSum, e.root, communicator, stream);
    case Movement::kBroadcast:
      return ncclBroadcast(e.from, e.to, count, type, e.root, communicator, stream);
    case Movement::kGather: return Gather(e, ranks);
    case Movement::kSend: {
      if (rank == e.root) return ncclSend(e.from, count, type, e.peer, communicator, stream);
      if (rank == e.peer) return ncclRecv(e.to, count, type, e.root, communicator, stream);
      return ncclSuccess;
    }
  }
  return ncclInvalidArgument;
}

ncclResult_t NcclRank::Gather(const Exchange& e, int ranks) const {
  const auto count = static_cast<size_t>(e.count);
  const ncclDataType_t type = NcclType(e.dtype);
  if (rank != e.root) return ncclSend(e.from, count, type, e.root, communicator, stream);
  const size_t bytes = count * ByteSize(e.dtype);
  for (int from = 0; from < ranks; ++from) {
    char* to = static_cast<char*>(e.to) + static_cast<size_t>(from) * bytes;
    if (from == e.root) {
      if (cudaMemcpyAsync(to, e.from, bytes, cudaMemcpyDeviceToDevice, stream) != cudaSuccess)
        return ncclUnhandledCudaError;
      continue;
    }
    const ncclResult_t result = ncclRecv(to, count, type, from, communicator, stream);
    if (result != ncclSuccess && result != ncclInProgress) return result;
  }
  return ncclSuccess;
}

}  // namespace dmuon::server
