// The courier of a slot whose device cannot read the others': it takes part in the session's exchanges, one after the other,
// between staging memory of its own. Only this slot's worker touches this slot's arenas.
//
//   gradient  arena -> out | gather | in of the owner -> mean, by the kernel that reads arenas elsewhere: the same bits
//   weight    master -> out of the owner, rounded | broadcast | out and in -> arena of every slot
//   window    the same, to the slot that asked
#ifndef DMUON_SERVER_STEP_EXCHANGE_COURIER_H_
#define DMUON_SERVER_STEP_EXCHANGE_COURIER_H_

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "server/collective/exchange_queue.h"
#include "server/step/courier.h"

namespace dmuon::server {

class ExchangeCourier final : public Courier {
 public:
  static CourierNeeds Needs(const StepContext& context, SlotId slot);
  // REQUIRES: context.exchanges.
  static absl::StatusOr<std::unique_ptr<Courier>> Create(StepContext& context, SlotId slot,
                                                         kernels::Stream stream);
  ~ExchangeCourier()
      override;  // REQUIRES: the communicator is gone, or nothing was submitted to it

  void FetchReady(uint64_t generation) override;
  void FetchRest(uint64_t generation) override;
  absl::StatusOr<bool> Fetched() override;
  bool Has(BoundaryId boundary, uint64_t generation) const override;
  uint64_t digest() const override { return digest_; }

  Sent Publish(ParameterId parameter, bool changed) override;
  absl::StatusOr<bool> Arrived(const Sent& sent) override;
  absl::Status Await(const Sent& sent) override;
  void FillWindows(uint64_t step, std::vector<Materialization>& wanted) override;

  void Settle() override;
  void Advance(bool gradients) override;
  bool Busy() const override;
  void Quiesce() override;

 private:
  static constexpr uint64_t kPlaces = 2;  // one moves while another is staged or unpacked

  // What an exchange moves between, and how far it is.
  struct Place {
    std::byte* out = nullptr;
    std::byte* in = nullptr;
    uint64_t number = 0;      // of the communicator; 0: nothing moves
    uint64_t mark = 0;        // behind what the slot's stream does for it
    uint64_t aside_mark = 0;  // and the stream beside it
  };
  // A micro whose copy was enqueued: when the device passes `mark`, all of it was read.
  struct Unread {
    BoundaryId boundary;
    uint64_t consumed = 0;
    uint64_t mark = 0;
  };

  ExchangeCourier(StepContext& context, SlotId slot, kernels::Stream stream);
  absl::Status Allocate();

  void Drop(uint64_t generation);
  void AppendRest();
  bool InEpoch();
  void Submit();
  void Deliver(bool gradients);
  void Finish();

  bool Lost(const QueuedExchange& e, uint64_t position) const;
  void Lose(const QueuedExchange& e);
  Exchange StageGradient(const QueuedExchange& e, Place& place);
  Exchange StageWeight(const QueuedExchange& e, Place& place);
  void Unpack(const QueuedExchange& e, Place& place);
  void UnpackGradient(const QueuedExchange& e, Place& place);
  bool RequestWindow(uint64_t step, Materialization& m);
  void MarkConsumed(BoundaryId boundary, uint64_t mark);

  Place& PlaceOf(uint64_t position) { return places_[position % kPlaces]; }
  bool Owns(const QueuedExchange& e) const {
    return context_.plan.transfers[e.parameter.index()].owner == slot_;
  }
  kernels::Backend& backend() const { return context_.backend(slot_); }

  StepContext& context_;
  ExchangeQueue& queue_;
  const SlotId slot_;
  const kernels::Stream
      stream_;             // of the means and the masters: behind whatever the owner computes
  kernels::Stream aside_;  // of what waits for no computation: copies from and to the arenas
  bool has_aside_ = false;
  void* staging_ = nullptr;
  std::array<Place, kPlaces> places_;

  ExchangeQueue::Epoch epoch_;
  bool left_ = false;  // the epoch: waits for the next one
  // Positions in this epoch: submitted, unpacked behind its end, and done on the device. In this order, the first the largest.
  uint64_t submitted_ = 0, ended_ = 0, finished_ = 0;
  uint64_t unpacked_ = 0;  // in any epoch: nothing is unpacked twice
  uint64_t digest_ = 0;    // of everything up to the last gradient
  uint64_t lost_generation_ = 0;
  absl::Status lost_;

  uint64_t generation_ = 1;  // what is before it has been dropped
  uint64_t rest_generation_ = 0;
  std::optional<uint64_t> rest_end_;  // behind the last gradient of it
  std::vector<uint64_t> fetched_;     // by boundary: the last generation of which a micro came
  std::vector<const void*> inputs_;   // scratch; reserved
  std::vector<Unread> unread_;        // in the order of the stream; reserved
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_STEP_EXCHANGE_COURIER_H_
