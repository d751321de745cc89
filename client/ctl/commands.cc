#include "client/ctl/commands.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/utf8.h"
#include "client/ctl/admin.h"
#include "client/ctl/views.h"

namespace dmuon::ctl {
namespace {

void Print(const std::string& text) {
  fwrite(text.data(), 1, text.size(), stdout);
  fflush(stdout);
}

void Print(const View& view, Format format) { Print(Render(view.tree, format, view.sections)); }

// Steps that come one by one are printed so; a list that is complete is printed as one.
absl::Status Steps(Admin& admin, const Invocation& invocation) {
  if (invocation.watch) {
    Print(RenderHeader(invocation.format, StepColumns()));
    RETURN_IF_ERROR(
        admin.Steps(invocation.session, true, invocation.last, [&](const v1::StepRecord& record) {
          Print(RenderRow(StepTree(record), invocation.format, StepColumns()));
        }));
    fprintf(stderr, "dmuonctl: session '%s' has ended\n", Printable(invocation.session).c_str());
    return absl::OkStatus();
  }
  View view{Tree{{"session", invocation.session}, {"steps", Tree::array()}},
            {{"", "steps", StepColumns()}}};
  RETURN_IF_ERROR(admin.Steps(
      invocation.session, false, invocation.last,
      [&](const v1::StepRecord& record) { view.tree["steps"].push_back(StepTree(record)); }));
  Print(view, invocation.format);
  return absl::OkStatus();
}

}  // namespace

absl::Status Run(const Invocation& invocation) {
  RETURN_IF_ERROR(CheckUtf8("NAME", invocation.session));
  ASSIGN_OR_RETURN(auto admin, Admin::Connect(invocation.endpoint, invocation.timeout));
  if (invocation.verb == "status") {
    ASSIGN_OR_RETURN(const auto answer, admin->Info());
    Print(StatusView(answer), invocation.format);
  } else if (invocation.verb == "sessions") {
    ASSIGN_OR_RETURN(const auto answer, admin->Sessions());
    Print(SessionsView(answer), invocation.format);
  } else if (invocation.verb == "session") {
    ASSIGN_OR_RETURN(const auto answer, admin->Session(invocation.session));
    Print(SessionView(answer), invocation.format);
  } else if (invocation.verb == "step") {
    ASSIGN_OR_RETURN(const auto answer, admin->Step(invocation.session, invocation.step));
    Print(StepView(answer.record()), invocation.format);
  } else if (invocation.verb == "drain") {
    ASSIGN_OR_RETURN(const auto answer, admin->Drain());
    Print(DrainView(answer), invocation.format);
  } else if (invocation.verb == "steps") {
    return Steps(*admin, invocation);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("no such command: ", invocation.verb));
  }
  return absl::OkStatus();
}

}  // namespace dmuon::ctl
