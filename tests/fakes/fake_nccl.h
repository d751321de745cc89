// What tests may ask of the stand-in for libnccl.so.2.
//
// The process that makes a unique id runs a hub: every rank of that communicator connects to it by a unix socket and sends it
// what it issues and the bytes of each operation when its stream comes to it; the hub computes in rank order and answers. It
// also keeps each rank's order of operations, and says when two differ; those operations then never complete, as with NCCL.
//
// It refuses what NCCL refuses: two ranks on one device, an id that is used again, memory that is not the device's. And what
// NCCL would not notice but dmuon does not do: a call on a communicator whose last call is still in progress, memory of
// another process.
//
// The fault script (fault_script.h) knows NCCL's functions by name, so a call can fail, block (ncclCommAbort:1=block) or kill.
// Three more names stand for what happens later, counted over all communicators of the process:
//   ncclInitHang:N=fail(1)     the Nth communicator never becomes ready
//   ncclHang:N=fail(1)         the Nth operation never completes
//   ncclAsyncError:N=fail(E)   the Nth operation never completes, and its communicator reports E
#ifndef DMUON_TESTS_FAKES_FAKE_NCCL_H_
#define DMUON_TESTS_FAKES_FAKE_NCCL_H_

#include <cstddef>

extern "C" {
// What the hubs of this process found out of order, a line each. At most `bytes` with the end; returns the full length.
size_t fake_nccl_disorder(char* text, size_t bytes);
// Communicators of this process that were neither destroyed nor aborted.
int fake_nccl_communicators();
}

#endif  // DMUON_TESTS_FAKES_FAKE_NCCL_H_
