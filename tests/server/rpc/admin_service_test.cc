#include "server/rpc/admin_service.h"

#include <gmock/gmock.h>

#include <thread>

#include "tests/server/rpc/services_fixture.h"

namespace dmuon::server::rpc {
namespace {

using ::testing::HasSubstr;

using AdminServiceTest = ServicesTest;

TEST_F(AdminServiceTest, InfoIsThatOfTheDaemon) {
  v1::GetInfoResponse info;
  ASSERT_TRUE(admin_->GetInfo(Context().get(), {}, &info).ok());
  EXPECT_EQ(info.version(), "1.2.3");
  EXPECT_EQ(info.instance_id(), "abc");
  EXPECT_EQ(info.pid(), getpid());
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_EQ(info.sessions(), 0u);
  EXPECT_FALSE(info.draining());
}

TEST_F(AdminServiceTest, ASessionIsListedAndDescribed) {
  const Attached attached = Attach();
  OpenAndConfigure(attached, "job");
  v1::ListSessionsResponse list;
  ASSERT_TRUE(admin_->ListSessions(Context().get(), {}, &list).ok());
  ASSERT_EQ(list.sessions_size(), 1);
  EXPECT_EQ(list.sessions(0).name(), "job");
  EXPECT_EQ(list.sessions(0).attached(), 1u);
  EXPECT_EQ(list.sessions(0).parameters(), 2u);
  EXPECT_EQ(list.sessions(0).state(), v1::SESSION_STATE_OPEN);

  v1::DescribeSessionRequest request;
  request.set_name("job");
  v1::DescribeSessionResponse session;
  ASSERT_TRUE(admin_->DescribeSession(Context().get(), request, &session).ok());
  ASSERT_EQ(session.placement_size(), 2);
  EXPECT_EQ(session.placement(0).name(), "layer.w");
  EXPECT_EQ(session.placement(0).boundary(), "layer");
  EXPECT_EQ(session.placement(0).bytes(), 128u);
  EXPECT_GT(session.placement(0).cost(), 0);
  ASSERT_EQ(session.attachments_size(), 1);
  EXPECT_EQ(session.attachments(0).pid(), getpid());
  request.set_name("nobody");
  EXPECT_EQ(admin_->DescribeSession(Context().get(), request, &session).error_code(),
            grpc::StatusCode::NOT_FOUND);

  v1::DescribeStepRequest step;
  v1::DescribeStepResponse described;
  for (const auto& [name, reason] : {std::pair{"job", "no step yet"}, {"nobody", "no session"}}) {
    step.set_name(name);
    const grpc::Status status = admin_->DescribeStep(Context().get(), step, &described);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(status.error_message(), HasSubstr(reason));
  }
}

TEST_F(AdminServiceTest, OthersSeeTheirOwnSessionsAndMayNotDrain) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  OpenAndConfigure(Attach(0), "roots");
  OpenAndConfigure(Attach(4712), "theirs");
  const auto list_as = [&](uid_t uid) {
    v1::ListSessionsResponse list;
    EXPECT_TRUE(
        v1::Admin::NewStub(DialAs(uid, socket_))->ListSessions(Context().get(), {}, &list).ok());
    std::vector<std::string> names;
    for (const auto& s : list.sessions()) names.push_back(s.name());
    return names;
  };
  EXPECT_THAT(list_as(0), ::testing::UnorderedElementsAre("roots", "theirs"));
  EXPECT_THAT(list_as(4711), ::testing::UnorderedElementsAre("roots", "theirs"));  // an admin_uid
  EXPECT_THAT(list_as(4712), ::testing::ElementsAre("theirs"));

  const auto admin = v1::Admin::NewStub(DialAs(4712, socket_));
  v1::DescribeSessionRequest describe;
  describe.set_name("roots");
  v1::DescribeSessionResponse session;
  EXPECT_EQ(admin->DescribeSession(Context().get(), describe, &session).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  v1::DescribeStepRequest step;
  step.set_name("roots");
  v1::DescribeStepResponse described;
  EXPECT_EQ(admin->DescribeStep(Context().get(), step, &described).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  v1::WatchStepsRequest watch;
  watch.set_name("roots");
  const auto context = Context();
  EXPECT_EQ(admin->WatchSteps(context.get(), watch)->Finish().error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  v1::DrainResponse drained;
  const grpc::Status drain = admin->Drain(Context().get(), {}, &drained);
  EXPECT_EQ(drain.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(drain.error_message(), HasSubstr("4712"));
  EXPECT_EQ(drains_, 0);
}

TEST_F(AdminServiceTest, DrainRefusesNewSessionsAtOnce) {
  const Attached attached = Attach();
  OpenAndConfigure(attached, "job");
  v1::DrainResponse drained;
  ASSERT_TRUE(admin_->Drain(Context().get(), {}, &drained).ok());
  EXPECT_EQ(drained.sessions_left(), 1u);
  EXPECT_EQ(drains_, 1);
  v1::OpenSessionResponse response;
  EXPECT_EQ(trainer_->OpenSession(Context(attached.token).get(), OpenRequest("other"), &response)
                .error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST_F(AdminServiceTest, WatchStepsEndsWithTheSessionAndWithoutFollowAtOnce) {
  const Attached attached = Attach();
  const uint64_t session = OpenAndConfigure(attached, "job");
  v1::WatchStepsRequest request;
  request.set_name("job");
  request.set_last(10);
  v1::StepRecord record;
  {
    const auto context = Context();
    const auto reader = admin_->WatchSteps(context.get(), request);
    EXPECT_FALSE(reader->Read(&record));
    EXPECT_TRUE(reader->Finish().ok());
  }
  request.set_follow(true);
  const auto context = Context();
  const auto reader = admin_->WatchSteps(context.get(), request);
  v1::CloseSessionRequest close;
  close.set_session_id(session);
  v1::CloseSessionResponse closed;
  ASSERT_TRUE(trainer_->CloseSession(Context(attached.token).get(), close, &closed).ok());
  EXPECT_FALSE(reader->Read(&record));
  const grpc::Status status = reader->Finish();
  // The watch may have begun before the session was closed or after it.
  EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::NOT_FOUND)
      << status.error_message();
}

TEST_F(AdminServiceTest, WatchersHaveALimitAndACallerWhoLeftDoesNotCount) {
  OpenAndConfigure(Attach(), "job");
  v1::WatchStepsRequest request;
  request.set_name("job");
  request.set_follow(true);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::ClientReader<v1::StepRecord>>> readers;
    grpc::Status refused;
    for (int i = 0; i < 33; ++i) {
      contexts.push_back(Context());
      readers.push_back(admin_->WatchSteps(contexts.back().get(), request));
    }
    // Which of them is the one too many is not said; it is the only one that ends.
    std::vector<std::thread> ends;
    std::atomic<int> exhausted{0}, cancelled{0};
    for (auto& reader : readers) {
      ends.emplace_back([&] {
        v1::StepRecord record;
        while (reader->Read(&record)) {
        }
        const grpc::StatusCode code = reader->Finish().error_code();
        if (code == grpc::StatusCode::RESOURCE_EXHAUSTED) ++exhausted;
        if (code == grpc::StatusCode::CANCELLED) ++cancelled;
      });
    }
    while (exhausted == 0) std::this_thread::yield();
    for (auto& context : contexts) context->TryCancel();
    for (std::thread& end : ends) end.join();
    // In the second round the places of the first may not all be free yet.
    if (round == 0) {
      EXPECT_EQ(exhausted, 1);
    }
    EXPECT_EQ(exhausted + cancelled, 33);
  }
}

TEST_F(AdminServiceTest, WhatIsNotBuiltNamesItself) {
  v1::SaveSnapshotResponse save;
  v1::RestoreSnapshotResponse restore;
  v1::EvictSessionResponse evict;
  const auto expect = [](const grpc::Status& status, const std::string& name) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr(name));
  };
  expect(admin_->SaveSnapshot(Context().get(), {}, &save), "dmuon.v1.Admin/SaveSnapshot");
  expect(admin_->RestoreSnapshot(Context().get(), {}, &restore), "dmuon.v1.Admin/RestoreSnapshot");
  expect(admin_->EvictSession(Context().get(), {}, &evict), "dmuon.v1.Admin/EvictSession");
}

}  // namespace
}  // namespace dmuon::server::rpc
