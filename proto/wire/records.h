// The records that a trainer pushes into its ring, one a boundary and one a step.
//
// Layout is a contract between client and daemon, like the messages: fixed size, little endian, version
// `kControlPageVersion`. A record comes from a process that is authenticated, not trusted: the daemon copies it out
// of the ring before it looks at it, and checks every field.
#ifndef DMUON_PROTO_WIRE_RECORDS_H_
#define DMUON_PROTO_WIRE_RECORDS_H_

#include <cstdint>
#include <type_traits>

namespace dmuon::wire {

enum class RecordType : uint32_t {
  kUnspecified = 0,  // refused
  kGradsReady =
      1,  // boundary, generation, micro: the boundary's place in GRAD holds this micro's gradients (or zeros)
  kPrepare = 2,  // generation: reduce, and put the norms into the page, before the step
  kStep =
      3,  // step, generation, micros, max_norm, flags: everything that this rank sends for this step is sent
  kDiscard = 4,      // generation: drop what came for it; the next one begins
  kMaterialize = 5,  // boundary, ticket: fill its weight window (Z3)
  kRelease = 6,      // boundary: its weight window may be used again (Z3)
};

enum StepFlags : uint32_t {
  kFoundInf = 1u << 0,  // this rank saw a non-finite gradient elsewhere (FSDP2 shards, GradScaler)
};

// A field that its type does not use is 0; `generation` is the slot's in every record.
struct Record {
  RecordType type = RecordType::kUnspecified;
  uint32_t boundary = 0;
  uint64_t generation = 0;    // counts STEP and DISCARD records of this slot; the first is 1
  uint64_t step = 0;          // kStep: the step id, 1 for the first
  uint64_t epoch = 0;         // as in the page
  uint64_t table_digest = 0;  // as in the page
  uint32_t micro =
      0;  // kGradsReady: 0, 1, ... within the generation. kStep: synchronised backward passes in it
  uint32_t flags = 0;   // kStep: StepFlags
  double max_norm = 0;  // kStep: clip the muon route to this global 2-norm; 0 = no clip
  uint64_t ticket = 0;  // kMaterialize: any rising number; answered in window_grant
};
static_assert(sizeof(Record) == 64 && std::is_trivially_copyable_v<Record>);

}  // namespace dmuon::wire

#endif  // DMUON_PROTO_WIRE_RECORDS_H_
