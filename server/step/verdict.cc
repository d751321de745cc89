#include "server/step/verdict.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"

namespace dmuon::server {
namespace {

size_t MostOwned(const Plan& plan) {
  size_t most = 0;
  for (const auto& owned : plan.owned) most = std::max(most, owned.size());
  return most;
}

uint64_t DigestOf(const wire::GroupHyper& hyper) {
  uint64_t words[sizeof(hyper) / 8];
  std::memcpy(words, &hyper, sizeof(hyper));
  Fnv1a hash;
  for (uint64_t w : words) hash.Add(w);
  return hash.value();
}

// "rank(s) 0, 2: 1; rank(s) 1: 2"
template <typename T>
std::string BySide(const std::vector<T>& values) {
  std::map<T, std::vector<size_t>> sides;
  for (size_t r = 0; r < values.size(); ++r) sides[values[r]].push_back(r);
  return absl::StrJoin(sides, "; ", [](std::string* out, const auto& side) {
    absl::StrAppend(out, "rank(s) ", absl::StrJoin(side.second, ", "), ": ", side.first);
  });
}

template <typename T>
bool AllEqual(const std::vector<T>& values) {
  return std::all_of(values.begin(), values.end(), [&](const T& v) { return v == values[0]; });
}

}  // namespace

Messages::Messages(const StepContext& context)
    : groups_(context.optimizer.groups.size()),
      presence_words_((context.table.parameters.size() + 63) / 64),
      max_owned_(MostOwned(context.plan)),
      buffer_(max_bytes()) {}

size_t Messages::max_bytes() const {
  return std::max(sizeof(Arrival) + 8 * (groups_ + presence_words_),
                  sizeof(Reduction) + 8 * max_owned_);
}

absl::Span<const std::byte> Messages::Arrive(const wire::Record& record,
                                             const wire::ControlPage& page,
                                             std::vector<wire::GroupHyper>& hyper) {
  const Arrival arrival{.step = record.step,
                        .generation = record.generation,
                        .unix_nanos = absl::GetCurrentTimeNanos(),
                        .max_norm = record.max_norm,
                        .micros = record.micro,
                        .flags = record.flags};
  std::memcpy(buffer_.data(), &arrival, sizeof(arrival));
  std::byte* at = buffer_.data() + sizeof(arrival);
  for (size_t g = 0; g < groups_; ++g, at += 8) {
    hyper[g] = page.groups()[g];  // copied before it is looked at: the page is the trainer's
    const uint64_t digest = DigestOf(hyper[g]);
    std::memcpy(at, &digest, 8);
  }
  for (size_t w = 0; w < presence_words_; ++w, at += 8) {
    const uint64_t word = page.PresenceWord(static_cast<uint32_t>(w));
    std::memcpy(at, &word, 8);
  }
  return {buffer_.data(), sizeof(Arrival) + 8 * (groups_ + presence_words_)};
}

const Arrival& Messages::ArrivalOf(absl::Span<const std::byte> message) {
  return *reinterpret_cast<const Arrival*>(message.data());
}

uint64_t Messages::HyperDigest(absl::Span<const std::byte> message, int group) const {
  uint64_t digest;
  std::memcpy(&digest, message.data() + sizeof(Arrival) + 8 * group, 8);
  return digest;
}

bool Messages::Present(absl::Span<const std::byte> message, ParameterId parameter) const {
  uint64_t word;
  std::memcpy(&word, message.data() + sizeof(Arrival) + 8 * (groups_ + parameter.index() / 64), 8);
  return word >> (parameter.index() % 64) & 1;
}

absl::Span<const std::byte> Messages::Reduce(const absl::Status& status, uint64_t digest,
                                             absl::Span<const double> square_sums) {
  Reduction reduction{.digest = digest, .code = static_cast<uint32_t>(status.code())};
  WriteText(status.message(), reduction.reason, sizeof(reduction.reason));
  std::memcpy(buffer_.data(), &reduction, sizeof(reduction));
  std::memcpy(buffer_.data() + sizeof(reduction), square_sums.data(), 8 * square_sums.size());
  return {buffer_.data(), sizeof(reduction) + 8 * square_sums.size()};
}

const Reduction& Messages::ReductionOf(absl::Span<const std::byte> message) {
  return *reinterpret_cast<const Reduction*>(message.data());
}

absl::Span<const double> Messages::NormsOf(absl::Span<const std::byte> message) {
  return {reinterpret_cast<const double*>(message.data() + sizeof(Reduction)),
          (message.size() - sizeof(Reduction)) / 8};
}

absl::Status CheckArrivals(const StepContext& context, const Messages& messages,
                           absl::Span<const absl::Span<const std::byte>> arrivals) {
  // The happy path compares with rank 0 and allocates nothing.
  const Arrival& first = Messages::ArrivalOf(arrivals[0]);
  bool generations = true, micros = true, clips = true;
  for (const auto& message : arrivals) {
    const Arrival& a = Messages::ArrivalOf(message);
    generations &= a.generation == first.generation;
    micros &= a.micros == first.micros;
    clips &= a.max_norm == first.max_norm;
  }
  const auto collect = [&](auto field) {
    std::vector<decltype(field(first))> values;
    for (const auto& message : arrivals) values.push_back(field(Messages::ArrivalOf(message)));
    return values;
  };
  if (!generations) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "step %d: not every rank dropped the same gradients (zero_grad after a backward without a "
        "step): generation by rank: %s",
        first.step, BySide(collect([](const Arrival& a) { return a.generation; }))));
  }
  if (!micros) {
    return absl::FailedPreconditionError(
        absl::StrFormat("step %d: ranks ran different numbers of backward passes: %s", first.step,
                        BySide(collect([](const Arrival& a) { return a.micros; }))));
  }
  if (!clips) {
    return absl::InvalidArgumentError(
        absl::StrFormat("step %d: ranks clip to different norms: %s", first.step,
                        BySide(collect([](const Arrival& a) { return a.max_norm; }))));
  }
  for (size_t g = 0; g < context.optimizer.groups.size(); ++g) {
    const uint64_t digest = messages.HyperDigest(arrivals[0], static_cast<int>(g));
    std::vector<size_t> different;
    for (size_t r = 1; r < arrivals.size(); ++r) {
      if (messages.HyperDigest(arrivals[r], static_cast<int>(g)) != digest) different.push_back(r);
    }
    if (!different.empty()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "step %d: group '%s' (lr, weight_decay, momentum, betas, eps) of rank(s) %s differs from "
          "that of rank 0",
          first.step, context.optimizer.groups[g].name, absl::StrJoin(different, ", ")));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckReductions(uint64_t step,
                             absl::Span<const absl::Span<const std::byte>> reductions) {
  bool same = true;
  for (size_t s = 0; s < reductions.size(); ++s) {
    const Reduction& r = Messages::ReductionOf(reductions[s]);
    if (r.code != 0) {
      return absl::AbortedError(
          absl::StrFormat("step %d: the gradients did not come to slot %d: %s; nothing was changed",
                          step, s, r.reason));
    }
    same &= r.digest == Messages::ReductionOf(reductions[0]).digest;
  }
  if (same) return absl::OkStatus();
  std::vector<std::string> digests;
  for (const auto& message : reductions)
    digests.push_back(absl::StrFormat("%016x", Messages::ReductionOf(message).digest));
  return absl::InternalError(absl::StrFormat(
      "step %d: slots took part in different exchanges: digest by %s", step, BySide(digests)));
}

absl::Status CheckHyper(const StepContext& context, uint64_t step,
                        absl::Span<const wire::GroupHyper> hyper) {
  for (size_t g = 0; g < hyper.size(); ++g) {
    const Group& group = context.optimizer.groups[g];
    const auto in_range = [&](const char* field, double value, double below) -> absl::Status {
      if (value >= 0 && value < below) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrFormat("step %d: group '%s': %s: expected a number from 0 to below %g, got %g",
                          step, group.name, field, below, value));
    };
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    RETURN_IF_ERROR(in_range("lr", hyper[g].lr, kInfinity));
    RETURN_IF_ERROR(in_range("weight_decay", hyper[g].weight_decay, kInfinity));
    if (group.route == Route::kMuon) {
      RETURN_IF_ERROR(in_range("momentum", hyper[g].momentum, kInfinity));
    } else {
      RETURN_IF_ERROR(in_range("beta1", hyper[g].beta1, 1));
      RETURN_IF_ERROR(in_range("beta2", hyper[g].beta2, 1));
      RETURN_IF_ERROR(in_range("eps", hyper[g].eps, kInfinity));
    }
  }
  return absl::OkStatus();
}

}  // namespace dmuon::server
