#include "kernels/newton_schulz/calibrate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "kernels/newton_schulz/form.h"

namespace dmuon::kernels {
namespace {

constexpr int kLeastRepeats = 3;
constexpr int kMostRepeats = 1000;

NewtonSchulzOptions OptionsFor(std::optional<Dtype> dtype, NsForm form) {
  NewtonSchulzOptions options;
  options.form = form;
  options.iteration_dtype = dtype;
  return options;
}

// A table by which gram is always, or never, worth it: forces the form that is to be measured.
std::shared_ptr<const CostTable> Forcing(NsForm form, std::optional<Dtype> dtype) {
  const bool gram = form == NsForm::kGram;
  return std::make_shared<CostTable>(
      CostTable{{{{dtype}, {1}, {1}, {{gram ? 1.0 : 1e18, gram ? 1e18 : 1.0}}}}, 1});
}

// Values that no form finds easy or hard: by a linear congruence, not worth a normal distribution.
void FillWithNoise(std::vector<float>& values) {
  uint32_t state = 20240607;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
}

// Memory of a backend for as long as this lives.
class Memory {
 public:
  static absl::StatusOr<Memory> Of(Backend& backend, size_t bytes) {
    ASSIGN_OR_RETURN(void* data, backend.Allocate(bytes));
    return Memory(backend, data);
  }
  Memory(Memory&& other) noexcept
      : backend_(other.backend_), data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&&) = delete;
  ~Memory() {
    if (data_ != nullptr) backend_->Free(data_);
  }
  void* get() const { return data_; }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  Memory(Backend& backend, void* data) : backend_(&backend), data_(data) {}
  Backend* backend_;
  void* data_;
};

class Measurement {
 public:
  Measurement(Backend& backend, const CalibrationPlan& plan, const CalibrationProgress& progress)
      : backend_(backend), plan_(plan), progress_(progress) {}

  absl::StatusOr<CostTable> Run() {
    ASSIGN_OR_RETURN(stream_, backend_.CreateStream());
    const absl::Cleanup destroy = [this] { backend_.DestroyStream(stream_); };
    const absl::Time end = absl::Now() + plan_.patience;
    ASSIGN_OR_RETURN(std::vector<std::vector<std::optional<Dtype>>> kinds, Kinds());
    CostTable table;
    ASSIGN_OR_RETURN(table.bytes_per_second, BytesPerSecond());
    for (size_t i = 0; i < kinds.size(); ++i) {
      const absl::Duration share = (end - absl::Now()) / static_cast<int64_t>(kinds.size() - i);
      ASSIGN_OR_RETURN(table.series.emplace_back(), Series(kinds[i], absl::Now() + share));
    }
    RETURN_IF_ERROR(Check(table));
    return table;
  }

 private:
  // The choices of a dtype, those that run the same in one group. Only what would run by default and fp32, which
  // `deterministic` means, are worth the time.
  absl::StatusOr<std::vector<std::vector<std::optional<Dtype>>>> Kinds() {
    constexpr int64_t kRows = 256, kCols = 1024;
    std::vector<std::vector<std::optional<Dtype>>> kinds;
    std::vector<std::string> kernels;
    for (std::optional<Dtype> dtype : {std::optional<Dtype>(), std::optional(Dtype::kF32),
                                       std::optional(Dtype::kBF16), std::optional(Dtype::kF16)}) {
      const auto plan = PlanNewtonSchulz(backend_, OptionsFor(dtype, NsForm::kGram), kRows, kCols);
      if (absl::IsUnimplemented(plan.status())) continue;
      if (!plan.ok()) return plan.status();
      const auto same = std::find(kernels.begin(), kernels.end(), (*plan)->kernel());
      if (same != kernels.end()) {
        kinds[same - kernels.begin()].push_back(dtype);
      } else if (!dtype.has_value() || *dtype == Dtype::kF32) {
        kernels.push_back((*plan)->kernel());
        kinds.push_back({dtype});
      }
    }
    return kinds;
  }

  absl::StatusOr<CostSeries> Series(std::vector<std::optional<Dtype>> asked, absl::Time deadline) {
    CostSeries series;
    series.asked = std::move(asked);
    series.aspects = plan_.aspects;
    double predicted = 0;  // seconds that the next side will take
    for (size_t i = 0; i < plan_.sides.size(); ++i) {
      const absl::Time start = absl::Now();
      if (i > 0 && start + absl::Seconds(predicted) > deadline) break;
      deadline_ = i > 0 ? deadline : absl::InfiniteFuture();
      const absl::StatusOr<std::vector<FormRates>> rates = Side(series.asked[0], plan_.sides[i]);
      if (absl::IsDeadlineExceeded(rates.status())) break;  // a busy machine: not as predicted
      if (!rates.ok()) return rates.status();
      series.rates.insert(series.rates.end(), rates->begin(), rates->end());
      series.sides.push_back(plan_.sides[i]);
      if (i + 1 < plan_.sides.size()) {
        const double growth = std::pow(
            static_cast<double>(plan_.sides[i + 1]) / static_cast<double>(plan_.sides[i]), 3);
        predicted = absl::ToDoubleSeconds(absl::Now() - start) * growth;
      }
    }
    return series;
  }

  // DEADLINE_EXCEEDED: it would not end before deadline_.
  absl::StatusOr<std::vector<FormRates>> Side(std::optional<Dtype> dtype, int64_t m) {
    std::vector<FormRates> rates;
    for (double aspect : plan_.aspects) {
      const int64_t n = std::llround(static_cast<double>(m) * aspect);
      ASSIGN_OR_RETURN(rates.emplace_back(), Point(dtype, m, n));
    }
    return rates;
  }

  absl::StatusOr<FormRates> Point(std::optional<Dtype> dtype, int64_t m, int64_t n) {
    ASSIGN_OR_RETURN(const double direct, FormSeconds(NsForm::kDirect, dtype, m, n));
    ASSIGN_OR_RETURN(const double gram, FormSeconds(NsForm::kGram, dtype, m, n));
    if (!progress_({dtype, m, n, direct, gram}))
      return absl::CancelledError("calibration was interrupted");
    const NewtonSchulzOptions defaults;
    return FormRates{FlopsOfForm(NsForm::kDirect, defaults, m, n) / direct,
                     FlopsOfForm(NsForm::kGram, defaults, m, n) / gram};
  }

  absl::StatusOr<double> FormSeconds(NsForm form, std::optional<Dtype> dtype, int64_t m,
                                     int64_t n) {
    NewtonSchulzOptions options = OptionsFor(dtype, form);
    options.costs = Forcing(form, dtype);
    ASSIGN_OR_RETURN(const auto plan, PlanNewtonSchulz(backend_, options, m, n));
    std::vector<float> values(static_cast<size_t>(m * n));
    FillWithNoise(values);
    const size_t bytes = values.size() * sizeof(float);
    ASSIGN_OR_RETURN(const Memory in, Memory::Of(backend_, bytes));
    ASSIGN_OR_RETURN(const Memory out, Memory::Of(backend_, bytes));
    ASSIGN_OR_RETURN(const Memory workspace, Memory::Of(backend_, plan->workspace_bytes()));
    backend_.CopyFromHost(stream_, in.get(), values.data(), bytes);
    RETURN_IF_ERROR(plan->Prepare({.in = in.floats(),
                                   .out = out.floats(),
                                   .offsets = kOneBlock,
                                   .workspace = workspace.get()}));
    return LeastSeconds([&] { plan->Run(stream_, in.floats(), out.floats(), workspace.get()); });
  }

  // What a commit moves: it reads M, G, W and O and writes M and W.
  absl::StatusOr<double> BytesPerSecond() {
    constexpr int64_t kCount = int64_t{8} << 20;  // beyond any cache
    constexpr double kBytes = 6.0 * sizeof(float) * kCount;
    const auto memory = [&] { return Memory::Of(backend_, kCount * sizeof(float)); };
    ASSIGN_OR_RETURN(const Memory momentum, memory());
    ASSIGN_OR_RETURN(const Memory gradient, memory());
    ASSIGN_OR_RETURN(const Memory weight, memory());
    ASSIGN_OR_RETURN(const Memory orthogonal, memory());
    ASSIGN_OR_RETURN(const double seconds, LeastSeconds([&] {
                       backend_.MuonCommit(stream_, {.momentum = momentum.floats(),
                                                     .gradient = gradient.floats(),
                                                     .weight = weight.floats(),
                                                     .orthogonal = orthogonal.floats(),
                                                     .count = kCount,
                                                     .mu = 0.95f,
                                                     .decay = 0.01f,
                                                     .scale = 0.1f});
                     }));
    return kBytes / seconds;
  }

  template <typename Work>
  absl::StatusOr<double> LeastSeconds(const Work& work) {
    using Clock = std::chrono::steady_clock;
    Clock::duration least = Clock::duration::max(), all{0};
    // The first run, which is not counted, touches every page and lets a device settle.
    for (int i = -1; i < kMostRepeats; ++i) {
      if (i >= kLeastRepeats && all >= absl::ToChronoNanoseconds(plan_.each)) break;
      const Clock::time_point start = Clock::now();
      work();
      RETURN_IF_ERROR(backend_.Synchronize(stream_));
      const Clock::duration took = Clock::now() - start;
      if (i < kLeastRepeats - 1 && absl::Now() + absl::FromChrono(took) > deadline_)
        return absl::DeadlineExceededError("the next run would end too late");
      if (i < 0) continue;
      least = std::min(least, took);
      all += took;
    }
    return std::max(std::chrono::duration<double>(least).count(), 1e-9);
  }

  Backend& backend_;
  const CalibrationPlan& plan_;
  const CalibrationProgress& progress_;
  Stream stream_;
  absl::Time deadline_ = absl::InfiniteFuture();  // that no run may begin before and end after
};

}  // namespace

absl::StatusOr<CostTable> Calibrate(Backend& backend, const CalibrationPlan& plan,
                                    const CalibrationProgress& progress) {
  return Measurement(backend, plan, progress).Run();
}

}  // namespace dmuon::kernels
