#include "client/ctl/views.h"

#include <cmath>
#include <map>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace dmuon::ctl {
namespace {

// "ROUTE_SHARDED_ADAMW" -> "sharded_adamw".
std::string EnumWord(absl::string_view name, absl::string_view prefix) {
  return absl::AsciiStrToLower(absl::StripPrefix(name, prefix));
}

std::string Word(v1::Route route) { return EnumWord(v1::Route_Name(route), "ROUTE_"); }
std::string Word(v1::SessionState state) {
  return EnumWord(v1::SessionState_Name(state), "SESSION_STATE_");
}
std::string Word(v1::StepOutcome outcome) {
  return EnumWord(v1::StepOutcome_Name(outcome), "STEP_OUTCOME_");
}

// JSON has no words for what is not finite, and an operator must see it: "nan", "inf" and "-inf" are strings.
Tree Number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Tree SummaryTree(const v1::SessionSummary& s) {
  return Tree{
      {"name", s.name()},         {"state", Word(s.state())}, {"world_size", s.world_size()},
      {"attached", s.attached()}, {"step", s.step()},         {"parameters", s.parameters()},
      {"bytes", s.bytes()},       {"uid", s.uid()},           {"imbalance", s.imbalance()}};
}

Tree SlotTree(const v1::DescribeSessionResponse& session, int slot, int owned) {
  Tree tree{{"slot", slot}, {"load", session.loads(slot)}, {"owned", owned}};
  if (slot < session.memory_size()) {
    const v1::SlotMemory& m = session.memory(slot);
    tree["grad_bytes"] = m.grad_bytes();
    tree["weight_bytes"] = m.weight_bytes();
    tree["state_bytes"] = m.state_bytes();
    tree["workspace_bytes"] = m.workspace_bytes();
    tree["staging_bytes"] = m.staging_bytes();
    tree["control_bytes"] = m.control_bytes();
    tree["page_locked_bytes"] = m.page_locked_bytes();
    tree["planning_bytes"] = m.planning_bytes();
  }
  for (const v1::AttachmentInfo& a : session.attachments()) {
    if (static_cast<int>(a.rank()) != slot) continue;
    tree["pid"] = a.pid();
    tree["alive"] = a.alive();
  }
  return tree;
}

Tree PlacementTree(const v1::Placement& p) {
  Tree shape = Tree::array();
  for (uint64_t dimension : p.shape()) shape.push_back(dimension);
  return Tree{{"name", p.name()},        {"owner", p.owner()}, {"route", Word(p.route())},
              {"shape", shape},          {"bytes", p.bytes()}, {"cost", p.cost()},
              {"boundary", p.boundary()}};
}

Tree BlockTree(const v1::BlockRecord& block) {
  Tree tree{{"parameter", block.parameter()},
            {"index", block.index()},
            {"row_begin", block.rows().row_begin()},
            {"row_end", block.rows().row_end()}};
  if (block.has_norm()) tree["norm"] = Number(block.norm());
  if (block.has_update_rms()) tree["update_rms"] = Number(block.update_rms());
  if (block.has_orthogonality_error())
    tree["orthogonality_error"] = Number(block.orthogonality_error());
  tree["form"] = block.form();
  tree["kernel"] = block.kernel();
  return tree;
}

}  // namespace

View StatusView(const v1::GetInfoResponse& info) {
  View view;
  view.tree = Tree{{"version", info.version()},
                   {"instance_id", info.instance_id()},
                   {"started_unix_seconds", info.started_unix_seconds()},
                   {"pid", info.pid()},
                   {"backend", info.backend()},
                   {"kernel", info.kernel()},
                   {"threads", info.threads()},
                   {"sessions", info.sessions()},
                   {"draining", info.draining()},
                   {"socket_dir", info.socket_dir()},
                   {"costs", info.costs()}};
  view.sections = {{"",
                    "",
                    {{"version", "version"},
                     {"instance", "instance_id"},
                     {"started", "started_unix_seconds", Unit::kTimestamp},
                     {"pid", "pid", Unit::kCount},
                     {"backend", "backend"},
                     {"kernel", "kernel"},
                     {"threads", "threads", Unit::kCount},
                     {"sessions", "sessions", Unit::kCount},
                     {"draining", "draining", Unit::kYesNo},
                     {"sockets", "socket_dir"},
                     {"costs", "costs"}}}};
  return view;
}

View SessionsView(const v1::ListSessionsResponse& sessions) {
  View view;
  view.tree["sessions"] = Tree::array();
  for (const v1::SessionSummary& s : sessions.sessions())
    view.tree["sessions"].push_back(SummaryTree(s));
  view.sections = {{"",
                    "sessions",
                    {{"NAME", "name"},
                     {"STATE", "state"},
                     {"RANKS", "world_size", Unit::kCount},
                     {"ATTACHED", "attached", Unit::kCount},
                     {"STEP", "step", Unit::kCount},
                     {"PARAMETERS", "parameters", Unit::kCount},
                     {"MEMORY", "bytes", Unit::kBytes},
                     {"IMBALANCE", "imbalance", Unit::kRatio},
                     {"UID", "uid", Unit::kCount}}}};
  return view;
}

View SessionView(const v1::DescribeSessionResponse& session) {
  View view;
  view.tree = SummaryTree(session.summary());
  const v1::Mesh& mesh = session.mesh();
  view.tree["mesh"] =
      Tree{{"replicate", mesh.replicate()}, {"shard", mesh.shard()}, {"tp", mesh.tp()}};
  view.tree["reshard_after_forward"] = session.reshard_after_forward();
  view.tree["lower_bound"] = session.lower_bound();
  view.tree["costs"] = session.costs_measured() ? "measured" : "flops";
  const Unit cost = session.costs_measured() ? Unit::kSeconds : Unit::kFlops;
  std::map<uint32_t, int> owned;
  for (const v1::Placement& p : session.placement()) ++owned[p.owner()];
  view.tree["slots"] = Tree::array();
  for (int slot = 0; slot < session.loads_size(); ++slot) {
    view.tree["slots"].push_back(SlotTree(session, slot, owned[static_cast<uint32_t>(slot)]));
  }
  view.tree["placement"] = Tree::array();
  for (const v1::Placement& p : session.placement())
    view.tree["placement"].push_back(PlacementTree(p));

  view.sections = {{"",
                    "",
                    {{"session", "name"},
                     {"state", "state"},
                     {"ranks", "world_size", Unit::kCount},
                     {"attached", "attached", Unit::kCount},
                     {"step", "step", Unit::kCount},
                     {"parameters", "parameters", Unit::kCount},
                     {"memory", "bytes", Unit::kBytes},
                     {"resharded after forward", "reshard_after_forward", Unit::kYesNo},
                     {"imbalance (max / mean load)", "imbalance", Unit::kRatio},
                     {"least possible max load", "lower_bound", cost},
                     {"costs are", "costs"}}},
                   {"slots",
                    "slots",
                    {{"SLOT", "slot", Unit::kCount},
                     {"LOAD", "load", cost},
                     {"OWNS", "owned", Unit::kCount},
                     {"GRAD", "grad_bytes", Unit::kBytes},
                     {"WEIGHT", "weight_bytes", Unit::kBytes},
                     {"STATE", "state_bytes", Unit::kBytes},
                     {"WORKSPACE", "workspace_bytes", Unit::kBytes},
                     {"STAGING", "staging_bytes", Unit::kBytes},
                     {"CONTROL", "control_bytes", Unit::kBytes},
                     {"PAGE-LOCKED", "page_locked_bytes", Unit::kBytes},
                     {"PLANNING", "planning_bytes", Unit::kBytes},
                     {"PID", "pid", Unit::kCount},
                     {"ALIVE", "alive", Unit::kYesNo}}},
                   {"placement",
                    "placement",
                    {{"PARAMETER", "name"},
                     {"OWNER", "owner", Unit::kCount},
                     {"ROUTE", "route"},
                     {"SHAPE", "shape", Unit::kShape},
                     {"BYTES", "bytes", Unit::kBytes},
                     {"COST", "cost", cost},
                     {"BOUNDARY", "boundary"}}}};
  return view;
}

View DrainView(const v1::DrainResponse& drain) {
  return {Tree{{"draining", true}, {"sessions_left", drain.sessions_left()}},
          {{"",
            "",
            {{"draining", "draining", Unit::kYesNo},
             {"sessions left", "sessions_left", Unit::kCount}}}}};
}

Tree StepTree(const v1::StepRecord& record) {
  Tree tree{{"step", record.step()},
            {"unix_seconds", static_cast<double>(record.unix_nanos()) * 1e-9},
            {"outcome", Word(record.outcome())},
            {"total_norm", Number(record.total_norm())},
            {"clip_coefficient", Number(record.clip_coefficient())},
            {"wait_seconds", record.wait_seconds()},
            {"reduce_seconds", record.reduce_seconds()},
            {"verdict_seconds", record.verdict_seconds()},
            {"update_seconds", record.update_seconds()},
            {"publish_seconds", record.publish_seconds()},
            {"total_seconds", record.total_seconds()},
            {"newton_schulz_calls", record.newton_schulz_calls()}};
  // Nothing where Newton-Schulz did not run.
  if (!record.forms().empty()) tree["forms"] = record.forms();
  if (!record.kernel().empty()) tree["kernel"] = record.kernel();
  if (record.code() != 0) tree["code"] = record.code();
  if (!record.reason().empty()) tree["reason"] = record.reason();
  return tree;
}

const std::vector<Column>& StepColumns() {
  static const auto* const columns = new std::vector<Column>{
      {"STEP", "step", Unit::kCount, 6},
      {"TIME", "unix_seconds", Unit::kTimestamp, 19},
      {"OUTCOME", "outcome", Unit::kText, 7},
      {"NORM", "total_norm", Unit::kNumber, 9},
      {"WAIT", "wait_seconds", Unit::kSeconds, 7},
      {"REDUCE", "reduce_seconds", Unit::kSeconds, 7},
      {"VERDICT", "verdict_seconds", Unit::kSeconds, 7},
      {"UPDATE", "update_seconds", Unit::kSeconds, 7},
      {"PUBLISH", "publish_seconds", Unit::kSeconds, 7},
      {"TOTAL", "total_seconds", Unit::kSeconds, 7},
      {"FORMS", "forms", Unit::kText, 0},
      {"REASON", "reason", Unit::kText, 0},
  };
  return *columns;
}

View StepView(const v1::StepRecord& record) {
  View view;
  view.tree = Tree{{"session", record.session()}};
  view.tree.update(StepTree(record));
  view.tree["blocks"] = Tree::array();
  for (const v1::BlockRecord& block : record.blocks())
    view.tree["blocks"].push_back(BlockTree(block));
  view.sections = {{"",
                    "",
                    {{"session", "session"},
                     {"step", "step", Unit::kCount},
                     {"time", "unix_seconds", Unit::kTimestamp},
                     {"outcome", "outcome"},
                     {"reason", "reason"},
                     {"norm", "total_norm", Unit::kNumber},
                     {"clip coefficient", "clip_coefficient", Unit::kNumber},
                     {"wait", "wait_seconds", Unit::kSeconds},
                     {"reduce", "reduce_seconds", Unit::kSeconds},
                     {"verdict", "verdict_seconds", Unit::kSeconds},
                     {"update", "update_seconds", Unit::kSeconds},
                     {"publish", "publish_seconds", Unit::kSeconds},
                     {"total", "total_seconds", Unit::kSeconds},
                     {"Newton-Schulz", "forms"}}},
                   {"blocks",
                    "blocks",
                    {{"PARAMETER", "parameter"},
                     {"BLOCK", "index", Unit::kCount},
                     {"FROM ROW", "row_begin", Unit::kCount},
                     {"TO ROW", "row_end", Unit::kCount},
                     {"NORM", "norm", Unit::kNumber},
                     {"UPDATE RMS", "update_rms", Unit::kNumber},
                     {"ORTHOGONALITY ERROR", "orthogonality_error", Unit::kNumber},
                     {"FORM", "form"},
                     {"KERNEL", "kernel"}}}};
  return view;
}

}  // namespace dmuon::ctl
