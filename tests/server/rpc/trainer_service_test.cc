#include "server/rpc/trainer_service.h"

#include <gmock/gmock.h>

#include <thread>

#include "tests/server/rpc/services_fixture.h"

namespace dmuon::server::rpc {
namespace {

using ::testing::HasSubstr;

using TrainerServiceTest = ServicesTest;

void ExpectCode(const grpc::Status& status, grpc::StatusCode code, const std::string& text) {
  EXPECT_EQ(status.error_code(), code) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr(text));
}

TEST_F(TrainerServiceTest, ASessionGoesFromOpenToReadyToClosed) {
  const Attached attached = Attach();
  const uint64_t session = OpenAndConfigure(attached, "job");
  EXPECT_EQ(configured_.parameters_size(), 2);
  EXPECT_GT(configured_.control_bytes(), 0u);
  EXPECT_TRUE(attachments_.InSession(attached.id));
  const grpc::Status registered = Register(attached, session);
  EXPECT_TRUE(registered.ok()) << registered.error_message();

  v1::GetStepResultRequest step;
  step.set_session_id(session);
  v1::GetStepResultResponse result;
  ExpectCode(trainer_->GetStepResult(Context(attached.token).get(), step, &result),
             grpc::StatusCode::NOT_FOUND, "");

  v1::CloseSessionRequest close;
  close.set_session_id(session);
  v1::CloseSessionResponse closed;
  EXPECT_TRUE(trainer_->CloseSession(Context(attached.token).get(), close, &closed).ok());
  EXPECT_FALSE(attachments_.InSession(attached.id));
  EXPECT_EQ(table_->size(), 0);
}

TEST_F(TrainerServiceTest, EveryCallNeedsATokenThatIsAlive) {
  const Attached attached = Attach();
  Kill(attached);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "attach to the daemon first"},
      {"zz", "32 hex digits"},
      {attached.token, "stale or unknown"}};
  for (const auto& [token, text] : cases) {
    const auto refused = [&, &text = text](const grpc::Status& status) {
      ExpectCode(status, grpc::StatusCode::UNAUTHENTICATED, text);
    };
    v1::OpenSessionResponse open;
    refused(trainer_->OpenSession(Context(token).get(), OpenRequest("job"), &open));
    v1::ConfigureGroupsResponse configure;
    refused(trainer_->ConfigureGroups(Context(token).get(), {}, &configure));
    v1::RegisterBuffersResponse buffers;
    refused(trainer_->RegisterBuffers(Context(token).get(), {}, &buffers));
    v1::GetStepResultResponse step;
    refused(trainer_->GetStepResult(Context(token).get(), {}, &step));
    v1::CloseSessionResponse close;
    refused(trainer_->CloseSession(Context(token).get(), {}, &close));
    const auto read_context = Context(token);
    v1::StateChunk chunk;
    const auto reader = trainer_->ReadState(read_context.get(), {});
    EXPECT_FALSE(reader->Read(&chunk));
    refused(reader->Finish());
    const auto write_context = Context(token);
    v1::WriteStateResponse written;
    refused(trainer_->WriteState(write_context.get(), &written)->Finish());
  }
}

TEST_F(TrainerServiceTest, AnotherUsersSessionIsDeniedAndAnotherRanksPlaceIsRefused) {
  const Attached owner = Attach();
  const uint64_t session = OpenAndConfigure(owner, "job");
  const Attached stranger = Attach(/*uid=*/4711);
  v1::CloseSessionRequest close;
  close.set_session_id(session);
  v1::CloseSessionResponse response;
  EXPECT_EQ(trainer_->CloseSession(Context(stranger.token).get(), close, &response).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  const Attached other = Attach();
  EXPECT_EQ(trainer_->CloseSession(Context(other.token).get(), close, &response).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(table_->size(), 1);
}

TEST_F(TrainerServiceTest, StepNamesItselfAsNotBuilt) {
  v1::StepResponse response;
  ExpectCode(trainer_->Step(Context().get(), {}, &response), grpc::StatusCode::UNIMPLEMENTED,
             "dmuon.v1.Trainer/Step");
}

TEST_F(TrainerServiceTest, ACoordinatorElsewhereIsNotBuiltAndThisOneMayBeNamed) {
  const Attached attached = Attach();
  v1::OpenSessionRequest request = OpenRequest("job");
  request.set_coordinator("unix:/elsewhere");
  v1::OpenSessionResponse response;
  ExpectCode(trainer_->OpenSession(Context(attached.token).get(), request, &response),
             grpc::StatusCode::UNIMPLEMENTED, "coordinator");
  request.set_coordinator("unix:" + dir_.path() + "/");
  EXPECT_TRUE(trainer_->OpenSession(Context(attached.token).get(), request, &response).ok());
}

TEST_F(TrainerServiceTest, StateIsWrittenInChunksAndReadBackInTheOrderAsked) {
  const Attached attached = Attach();
  const uint64_t session = OpenAndConfigure(attached, "job");
  const std::string w(8 * 4 * 4, 'w'), b(8 * 4, 'b');

  const auto write_context = Context(attached.token);
  v1::WriteStateResponse written;
  const auto writer = trainer_->WriteState(write_context.get(), &written);
  v1::WriteStateRequest request;
  request.set_session_id(session);
  request.mutable_chunk()->mutable_state()->set_parameter("layer.w");
  request.mutable_chunk()->mutable_state()->set_kind(v1::STATE_KIND_WEIGHT);
  request.mutable_chunk()->set_total_bytes(w.size());
  request.mutable_chunk()->set_data(w.substr(0, 50));
  ASSERT_TRUE(writer->Write(request));
  request.Clear();
  request.mutable_chunk()->set_data(w.substr(50));
  ASSERT_TRUE(writer->Write(request));
  request.mutable_chunk()->mutable_state()->set_parameter("layer.b");
  request.mutable_chunk()->mutable_state()->set_kind(v1::STATE_KIND_WEIGHT);
  request.mutable_chunk()->set_total_bytes(b.size());
  request.mutable_chunk()->set_data(b);
  ASSERT_TRUE(writer->Write(request));
  writer->WritesDone();
  const grpc::Status wrote = writer->Finish();
  ASSERT_TRUE(wrote.ok()) << wrote.error_message();
  EXPECT_EQ(written.states_written(), 2u);
  ASSERT_TRUE(Register(attached, session).ok());

  v1::ReadStateRequest read;
  read.set_session_id(session);
  for (const char* name : {"layer.b", "layer.w"}) {
    v1::StateName& state = *read.add_states();
    state.set_parameter(name);
    state.set_kind(v1::STATE_KIND_WEIGHT);
  }
  const auto read_context = Context(attached.token);
  const auto reader = trainer_->ReadState(read_context.get(), read);
  v1::StateChunk chunk;
  std::vector<std::string> names, data;
  while (reader->Read(&chunk)) {
    if (chunk.has_state()) {
      names.push_back(absl::StrCat(chunk.state().parameter(), " ", chunk.total_bytes()));
      data.emplace_back();
    }
    data.back() += chunk.data();
  }
  const grpc::Status finished = reader->Finish();
  ASSERT_TRUE(finished.ok()) << finished.error_message();
  EXPECT_THAT(names, ::testing::ElementsAre("layer.b 32", "layer.w 128"));
  EXPECT_EQ(data[0], b);
  EXPECT_EQ(data[1], w);
}

TEST_F(TrainerServiceTest, ALargeStateTravelsInChunksOfAtMostOneMebibyte) {
  const Attached attached = Attach();
  v1::OpenSessionRequest open = OpenRequest("large");
  open.mutable_parameters(0)->set_shape(0, 1024);
  open.mutable_parameters(0)->set_shape(1, 640);  // 2.5 MiB
  v1::OpenSessionResponse opened;
  ASSERT_TRUE(trainer_->OpenSession(Context(attached.token).get(), open, &opened).ok());
  const grpc::Status configured = trainer_->ConfigureGroups(
      Context(attached.token).get(), ConfigureRequest(opened.session_id()), &configured_);
  ASSERT_TRUE(configured.ok()) << configured.error_message();
  ASSERT_TRUE(Register(attached, opened.session_id()).ok());
  v1::ReadStateRequest read;
  read.set_session_id(opened.session_id());
  read.add_states()->set_parameter("layer.w");
  read.mutable_states(0)->set_kind(v1::STATE_KIND_WEIGHT);
  const auto context = Context(attached.token);
  const auto reader = trainer_->ReadState(context.get(), read);
  v1::StateChunk chunk;
  std::vector<size_t> sizes;
  while (reader->Read(&chunk)) sizes.push_back(chunk.data().size());
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_THAT(sizes, ::testing::ElementsAre(1u << 20, 1u << 20, 1u << 19));
}

TEST_F(TrainerServiceTest, ALyingTotalIsRefusedWithParameterExpectedAndGiven) {
  const Attached attached = Attach();
  const uint64_t session = OpenAndConfigure(attached, "job");
  const auto context = Context(attached.token);
  v1::WriteStateResponse written;
  const auto writer = trainer_->WriteState(context.get(), &written);
  v1::WriteStateRequest request;
  request.set_session_id(session);
  request.mutable_chunk()->mutable_state()->set_parameter("layer.w");
  request.mutable_chunk()->mutable_state()->set_kind(v1::STATE_KIND_WEIGHT);
  request.mutable_chunk()->set_total_bytes(uint64_t{1} << 60);
  writer->Write(request);
  ExpectCode(writer->Finish(), grpc::StatusCode::INVALID_ARGUMENT,
             "'layer.w': total_bytes: expected 128, given 1152921504606846976");
}

TEST_F(TrainerServiceTest, ADeathWakesTheRanksThatWait) {
  const Attached first = Attach();
  grpc::Status status_of_first;
  std::atomic<bool> answered{false};
  std::thread waiting([&] {
    v1::OpenSessionResponse response;
    status_of_first =
        trainer_->OpenSession(Context(first.token).get(), OpenRequest("pair", 0, 2), &response);
    answered = true;
  });
  while (table_->size() == 0) std::this_thread::yield();
  // The one that waits is killed: its own call ends, and the session with it. The attach server says it again and again
  // while the call runs.
  for (Kill(first); !answered; std::this_thread::yield()) table_->OnTrainerGone(first.id);
  waiting.join();
  EXPECT_FALSE(status_of_first.ok());
  EXPECT_NE(status_of_first.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED)
      << status_of_first.error_message();
  while (table_->size() != 0) std::this_thread::yield();
}

TEST_F(TrainerServiceTest, ARankThatDiedBetweenItsTokenAndItsSessionLeavesNothing) {
  // The registry knows of the death while the call runs, the sessions were told before the call entered one: what
  // happens when the death falls between the check of the token and Open.
  const Attached attached = Attach();
  attachments_.BeginCall(attached.token).value();
  attachments_.Remove(attached.id);
  table_->OnTrainerGone(attached.id);
  OpenSpec spec;
  spec.job = "ghost";
  spec.table.boundaries.push_back({"layer", false});
  spec.table.parameters.push_back({"layer.w", {8, 4}, Route::kMuon, BoundaryId(0), {}});
  ASSERT_TRUE(table_->Open(Trainer{attached.id, geteuid(), getpid()}, spec).ok());
  EXPECT_EQ(table_->size(), 1);
  if (!attachments_.EndCall(attached.id)) table_->OnTrainerGone(attached.id);
  EXPECT_EQ(table_->size(), 0);
}

}  // namespace
}  // namespace dmuon::server::rpc
