#include "server/step/courier.h"

#include "server/step/exchange_courier.h"
#include "server/step/publish.h"
#include "server/step/reduce.h"

namespace dmuon::server {
namespace {

// Slots read and write each other's memory: an owner does everything for what it owns.
class DirectCourier final : public Courier {
 public:
  DirectCourier(StepContext& context, SlotId slot, kernels::Stream stream)
      : context_(context), slot_(slot), stream_(stream), reducer_(context, slot, stream) {}

  void FetchReady(uint64_t generation) override { reducer_.ReduceReady(generation); }
  void FetchRest(uint64_t generation) override { reducer_.ReduceRest(generation); }
  absl::StatusOr<bool> Fetched() override { return true; }
  bool Has(BoundaryId boundary, uint64_t generation) const override {
    return reducer_.Has(boundary, generation);
  }
  uint64_t digest() const override { return 0; }

  Sent Publish(ParameterId parameter, bool changed) override {
    if (changed) WriteWeight(context_, stream_, parameter);
    return {context_.backend(slot_).Mark(stream_)};
  }
  absl::StatusOr<bool> Arrived(const Sent& sent) override {
    return context_.backend(slot_).Reached(stream_, sent.mark);
  }
  absl::Status Await(const Sent&) override { return absl::OkStatus(); }
  void FillWindows(uint64_t step, std::vector<Materialization>& wanted) override {
    server::FillWindows(context_, slot_, stream_, step, wanted);
  }

  void Settle() override { reducer_.Settle(); }
  void Advance(bool) override {}
  bool Busy() const override { return reducer_.Reading(); }
  void Quiesce() override {}

 private:
  StepContext& context_;
  const SlotId slot_;
  const kernels::Stream stream_;
  Reducer reducer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Courier>> MakeCourier(StepContext& context, SlotId slot,
                                                     kernels::Stream stream) {
  if (context.exchanges != nullptr) return ExchangeCourier::Create(context, slot, stream);
  return std::make_unique<DirectCourier>(context, slot, stream);
}

CourierNeeds NeedsOfCourier(const StepContext& context, SlotId slot) {
  return context.exchanges != nullptr ? ExchangeCourier::Needs(context, slot) : CourierNeeds();
}

}  // namespace dmuon::server
