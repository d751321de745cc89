// DeviceCommunicator over NCCL.
//
// One thread issues every NCCL call of the communicator, so that no call of the library meets another, and never in a call
// that blocks: communicators are non-blocking, and a call in progress is polled until its deadline. A second thread only
// watches the clock: a call that does not return makes it report that the process is stuck.
#ifndef DMUON_SERVER_COLLECTIVE_NCCL_COMMUNICATOR_H_
#define DMUON_SERVER_COLLECTIVE_NCCL_COMMUNICATOR_H_

#include <nccl.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/collective/device_communicator.h"
#include "server/collective/nccl_rank.h"

namespace dmuon::server {

class NcclCommunicator final : public DeviceCommunicator {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceCommunicator>> Create(
      const DeviceCommunicatorOptions& options);
  ~NcclCommunicator() override;

  State state() const override;
  bool formed() const override;
  absl::Status cause() const override;
  absl::StatusOr<uint64_t> Submit(int rank, kernels::Stream stream,
                                  const Exchange& exchange) override;
  absl::StatusOr<bool> Ended(int rank, uint64_t number) const override;
  uint64_t digest(int rank) const override;
  void Abort(const absl::Status& cause) override;

 private:
  explicit NcclCommunicator(const DeviceCommunicatorOptions& options);
  NcclRank* Find(int rank) const;
  size_t SlotOf(uint64_t number) const {
    return number % static_cast<size_t>(options_.most_under_way);
  }

  // The issuing thread.
  void Run();
  absl::Status Form();
  absl::Status Turn();
  absl::Status IssueNext();
  absl::Status Agree(uint64_t number) const;
  absl::Status CollectEnded();
  absl::Status Grouped(absl::string_view doing, absl::string_view what,
                       absl::FunctionRef<ncclResult_t(NcclRank&)> call);
  // Whether any communicator still works on its last call; an error that one of them reports.
  absl::StatusOr<bool> InProgress(absl::string_view doing);
  // Until none does.
  absl::Status Settle(absl::string_view doing, absl::Duration patience);
  std::string Describe(uint64_t number) const;
  void CloseAll();
  void AbortAll();
  // One call of the library, with the watching thread told.
  template <typename F>
  auto Call(absl::string_view what, const F& call);

  void Watch();
  absl::Status Cancelled() const;
  bool Interrupted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return news_ || closing_ || !cause_.ok();
  }

  const DeviceCommunicatorOptions options_;
  std::vector<std::unique_ptr<NcclRank>> locals_;
  uint64_t issued_ = 0, ended_ = 0;      // of the issuing thread: by all local ranks
  std::vector<absl::Time> issued_time_;  // ring

  mutable absl::Mutex mu_;
  State state_ ABSL_GUARDED_BY(mu_) = State::kForming;
  bool formed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status cause_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;   // the destructor waits
  bool finished_ ABSL_GUARDED_BY(mu_) = false;  // the issuing thread has left the library
  bool news_ ABSL_GUARDED_BY(mu_) = false;      // something was submitted
  absl::string_view calling_ ABSL_GUARDED_BY(mu_);
  absl::Time called_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();

  std::thread issuing_, watching_;
};

}  // namespace dmuon::server

#endif  // DMUON_SERVER_COLLECTIVE_NCCL_COMMUNICATOR_H_
