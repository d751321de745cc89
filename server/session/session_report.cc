// What a session tells about itself: its description and its steps.

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "server/session/session.h"

namespace dmuon::server {
namespace {

// More than any step takes between its verdict and its end.
constexpr absl::Duration kReportTimeout = absl::Seconds(60);

std::string KernelText(const std::vector<std::unique_ptr<Worker>>& workers) {
  for (const auto& w : workers) {
    if (!w->forms().kernel.empty()) return w->forms().kernel;
  }
  return "";
}

}  // namespace

SessionDescription Session::Describe() const {
  absl::MutexLock lock(&mu_);
  SessionDescription d;
  d.name = name();
  d.state = state_;
  if (state_ == SessionState::kReady && StepUnderWay()) d.state = SessionState::kStepping;
  if (state_ == SessionState::kReady && built_ && !context_.failure().ok()) {
    d.state = SessionState::kDegraded;
  }
  d.uid = uid_;
  d.mesh = context_.mesh;
  d.reshard_after_forward = reshard_after_forward_;
  d.step = context_.answered_step.load();
  d.table = context_.table;
  d.placement = placement_;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].came) {
      d.attachments.push_back({static_cast<int>(r), ranks_[r].trainer.pid, ranks_[r].alive});
    }
  }
  if (built_) {
    for (const auto& worker : workers_) d.memory.push_back(worker->memory());
  }
  return d;
}

// `measures`: of all slots' blocks, one slot after the other; none where they are not remembered.
std::vector<BlockReport> Session::BlocksOf(absl::Span<const BlockMeasures> measures) const {
  std::vector<std::pair<Worker::OwnedBlock, BlockMeasures>> ran;
  size_t at = 0;
  for (const auto& worker : workers_) {
    for (const Worker::OwnedBlock& block : worker->blocks()) {
      if (at == measures.size()) return {};
      if (const BlockMeasures& m = measures[at++]; m.ran) ran.push_back({block, m});
    }
  }
  // As the table has them, whoever owns them and whatever ran together.
  std::ranges::sort(ran, {}, [](const auto& b) {
    return std::pair(b.first.parameter.index(), b.first.plan.index);
  });
  std::vector<BlockReport> blocks;
  for (const auto& [block, m] : ran)
    blocks.push_back({context_.parameter(block.parameter).name, block.plan, m});
  return blocks;
}

// Of the blocks that ran in the step; "" where none did.
std::string Session::FormsOf(const SlotStep& step) const {
  if (step.newton_schulz_calls == 0) return "";
  int gram = 0, direct = 0;
  for (const auto& w : workers_) {
    gram += w->forms().gram;
    direct += w->forms().direct;
  }
  if (step.newton_schulz_calls < gram + direct) {  // some parameter had no gradient
    LoggedStep logged;
    std::vector<BlockMeasures> measures;
    if (!context_.log->Find(step.step, &logged, &measures) || measures.empty()) return "";
    gram = direct = 0;
    for (const BlockReport& block : BlocksOf(measures))
      ++(block.plan.form == "gram" ? gram : direct);
  }
  return absl::StrFormat("gram %d, direct %d", gram, direct);
}

StepReport Session::ReportOf(const LoggedStep& logged) const {
  const SlotStep& s = logged.merged;
  StepReport r;
  r.session = name();
  r.step = s.step;
  r.status = s.status;
  r.outcome = !s.status.ok() ? StepOutcome::kFailed
              : s.applied    ? StepOutcome::kApplied
                             : StepOutcome::kSkippedNonfinite;
  r.total_norm = s.total_norm;
  r.clip_coefficient = s.clip_coefficient;
  r.wait = s.wait;
  r.reduce = s.reduce;
  r.verdict = s.verdict;
  r.update = s.update;
  r.publish = s.publish;
  r.total = s.total;
  r.newton_schulz_calls = s.newton_schulz_calls;
  r.forms = FormsOf(s);
  if (s.newton_schulz_calls > 0) r.kernel = KernelText(workers_);
  r.at = logged.at;
  return r;
}

absl::StatusOr<StepReport> Session::StepResult(uint64_t step, bool with_blocks) const {
  const absl::Status none =
      absl::NotFoundError(absl::StrFormat("session '%s': no step yet", name()));
  {
    absl::MutexLock lock(&mu_);
    if (!built_) return none;
  }
  // A trainer goes on at the verdict, so it may ask before the last slot has written down what the step cost.
  const uint64_t answered = context_.answered_step.load();
  if (const uint64_t wanted = step == 0 ? answered : step; wanted > 0 && wanted <= answered) {
    context_.log->After(wanted - 1, kReportTimeout);
  }
  LoggedStep logged;
  std::vector<BlockMeasures> measures;
  if (!context_.log->Find(step, &logged, with_blocks ? &measures : nullptr)) {
    if (step == 0) return none;
    const std::vector<LoggedStep> all = context_.log->After(0, absl::ZeroDuration());
    return absl::NotFoundError(absl::StrFormat(
        "session '%s': step %d is not remembered, %s", name(), step,
        all.empty()
            ? "nor is any other"
            : absl::StrFormat("only %d to %d", all.front().merged.step, all.back().merged.step)));
  }
  StepReport report = ReportOf(logged);
  report.blocks = BlocksOf(measures);
  return report;
}

std::vector<StepReport> Session::Steps(uint64_t after, absl::Duration timeout) const {
  {
    const absl::Time deadline = absl::Now() + timeout;
    absl::MutexLock lock(&mu_);
    const auto built = [this]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return built_ || !failure_.ok(); };
    mu_.AwaitWithDeadline(absl::Condition(&built), deadline);
    if (!built_) return {};
    timeout = deadline - absl::Now();
  }
  std::vector<StepReport> reports;
  for (const LoggedStep& logged : context_.log->After(after, timeout))
    reports.push_back(ReportOf(logged));
  return reports;
}

}  // namespace dmuon::server
