// The Admin service of one daemon, as an operator asks it.
#ifndef DMUON_CLIENT_CTL_ADMIN_H_
#define DMUON_CLIENT_CTL_ADMIN_H_

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/endpoint.h"
#include "dmuon/v1/admin.grpc.pb.h"

namespace dmuon::ctl {

class Admin {
 public:
  // Checks that somebody listens: UNAVAILABLE says how to start a daemon. `timeout` bounds each unary call.
  static absl::StatusOr<std::unique_ptr<Admin>> Connect(const std::string& endpoint,
                                                        absl::Duration timeout);

  absl::StatusOr<v1::GetInfoResponse> Info();
  absl::StatusOr<v1::ListSessionsResponse> Sessions();
  absl::StatusOr<v1::DescribeSessionResponse> Session(const std::string& name);
  absl::StatusOr<v1::DescribeStepResponse> Step(const std::string& name, uint64_t step);
  absl::StatusOr<v1::DrainResponse> Drain();
  // Calls `each` for the last `last` steps, and with `follow` for every later one until the session closes.
  absl::Status Steps(const std::string& name, bool follow, uint32_t last,
                     absl::FunctionRef<void(const v1::StepRecord&)> each);

 private:
  Admin(client::Endpoint endpoint, absl::Duration timeout)
      : endpoint_(std::move(endpoint)), timeout_(timeout) {}
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(std::unique_ptr<grpc::ClientAsyncResponseReader<Response>> (
                                    v1::Admin::Stub::*prepare)(grpc::ClientContext*, const Request&,
                                                               grpc::CompletionQueue*),
                                const Request& request);

  absl::Status Gone(const absl::Status& status) const;

  const client::Endpoint endpoint_;
  const absl::Duration timeout_;
  std::unique_ptr<v1::Admin::Stub> stub_;
};

// Ctrl-C ends what is under way with CANCELLED. Once, at the start of the program.
void InstallInterrupt();

}  // namespace dmuon::ctl

#endif  // DMUON_CLIENT_CTL_ADMIN_H_
