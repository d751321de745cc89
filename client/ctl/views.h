// The Admin service's answers as trees, and how each is shown to a person.
#ifndef DMUON_CLIENT_CTL_VIEWS_H_
#define DMUON_CLIENT_CTL_VIEWS_H_

#include <vector>

#include "client/ctl/printer.h"
#include "dmuon/v1/admin.pb.h"

namespace dmuon::ctl {

struct View {
  Tree tree;
  std::vector<Section> sections;
};

View StatusView(const v1::GetInfoResponse& info);
View SessionsView(const v1::ListSessionsResponse& sessions);
// Placement per parameter, loads per slot with their bound, memory, attachments.
View SessionView(const v1::DescribeSessionResponse& session);
View DrainView(const v1::DrainResponse& drain);

// Steps come one by one.
Tree StepTree(const v1::StepRecord& record);
const std::vector<Column>& StepColumns();
// One step, with what each block did in it.
View StepView(const v1::StepRecord& record);

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_VIEWS_H_
