// Arenas, descriptors and tokens: what a broken or hostile trainer may try with them.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "client/connection_impl.h"
#include "client/control_channel.h"
#include "client/endpoint.h"
#include "client/rpc_call.h"
#include "client/session_impl.h"
#include "tests/e2e/configured_rank.h"

namespace dmuon::testing {
namespace {

using client::Connection;
using client::Session;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using wire::ArenaKind;
using wire::AttachFrame;
using wire::AttachType;

class Buffers : public ConfiguredRank {
 protected:
  v1::RegisterBuffersRequest TrueRequest() {
    const Session::Impl& s = session_->impl();
    v1::RegisterBuffersRequest request;
    request.set_session_id(s.id);
    for (const auto& [kind, size] : {std::pair{v1::BUFFER_KIND_CONTROL, s.control.bytes()},
                                     std::pair{v1::BUFFER_KIND_GRAD, s.grad.bytes()},
                                     std::pair{v1::BUFFER_KIND_WEIGHT, s.weight.bytes()}}) {
      request.add_buffers()->set_kind(kind);
      request.mutable_buffers(request.buffers_size() - 1)->set_size(size);
    }
    return request;
  }
  absl::Status Register(const v1::RegisterBuffersRequest& request, Connection* as = nullptr) {
    v1::RegisterBuffersResponse response;
    return (as != nullptr ? as : connection_.get())
        ->impl()
        .Unary(&v1::Trainer::Stub::PrepareAsyncRegisterBuffers, request, response);
  }
  // A call with a token of the test's choice.
  absl::Status CallWithToken(const std::string& token) {
    auto channel = client::OpenControlChannel(*client::ParseEndpoint(endpoint()));
    auto stub = v1::Trainer::NewStub(*channel);
    client::RpcCall call([] { return absl::OkStatus(); });
    if (!token.empty()) call.context().AddMetadata(wire::kTokenMetadata, token);
    v1::GetStepResultRequest request;
    request.set_session_id(1);
    v1::GetStepResultResponse response;
    return client::CallUnary(call, *stub, &v1::Trainer::Stub::PrepareAsyncGetStepResult, request,
                             response);
  }
  UniqueFd RawAttach() {
    const client::Endpoint where = *client::ParseEndpoint(endpoint());
    return *client::ConnectUnix(where, where.attach_path(), SOCK_SEQPACKET, absl::Seconds(30));
  }
};

TEST_F(Buffers, ALyingSizeOrOffsetIsRefusedWithTheTrueOne) {
  if (OnDevice()) GTEST_SKIP() << "of sealed memory";
  Configure("lying");
  const auto refused = [&](const std::function<void(v1::RegisterBuffersRequest&)>& lie) {
    v1::RegisterBuffersRequest request = TrueRequest();
    lie(request);
    const absl::Status status = Register(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  using Request = v1::RegisterBuffersRequest;
  const uint64_t grad = session_->impl().grad.bytes();
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  for (uint64_t size : {grad + 4096, grad - 4096, uint64_t{0}, most}) {
    EXPECT_THAT(refused([&](Request& r) { r.mutable_buffers(1)->set_size(size); }),
                HasSubstr("expected offset 0 and " + std::to_string(grad)));
  }
  for (uint64_t offset : {uint64_t{256}, most, most - grad + 1}) {
    EXPECT_THAT(refused([&](Request& r) { r.mutable_buffers(2)->set_offset(offset); }),
                HasSubstr("offset"));
  }
  refused([](Request& r) { r.mutable_buffers(0)->set_kind(v1::BUFFER_KIND_UNSPECIFIED); });
  refused([](Request& r) { r.mutable_buffers(0)->set_kind(static_cast<v1::BufferKind>(77)); });
  refused([](Request& r) { r.mutable_buffers(0)->set_kind(v1::BUFFER_KIND_GRAD); });
  refused([](Request& r) { r.mutable_buffers()->RemoveLast(); });
  refused([](Request& r) { *r.add_buffers() = r.buffers(0); });
  refused([](Request& r) { r.set_rank(7); });
  refused([](Request& r) { r.set_rank(4000000000u); });
  EXPECT_TRUE(session_->Start().ok());
}

TEST_F(Buffers, AnArenaCannotBeShrunkGrownOrUnsealed) {
  if (OnDevice()) GTEST_SKIP() << "of sealed memory";
  Configure("shrink");
  for (ArenaKind kind : {ArenaKind::kControl, ArenaKind::kGrad, ArenaKind::kWeight}) {
    const auto arena = connection_->impl().attach->Fetch(session_->impl().id, 0, kind);
    ASSERT_TRUE(arena.ok()) << arena.status();
    for (off_t size : {off_t{0}, static_cast<off_t>(arena->bytes) * 2}) {
      EXPECT_EQ(ftruncate(arena->fd.get(), size), -1);
      EXPECT_EQ(errno, EPERM);
    }
    EXPECT_EQ(fallocate(arena->fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0)
        << "a hole reads as zeros: harmless";
    EXPECT_EQ(fcntl(arena->fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
    EXPECT_EQ(errno, EPERM);
  }
}

TEST_F(Buffers, ForeignDescriptorsAreClosedUnseen) {
  const int before = daemon().Use().descriptors;
  {
    UniqueFd socket = RawAttach();
    AttachFrame hello;
    hello.type = AttachType::kHello;
    strcpy(hello.client, "foreign");
    const UniqueFd memory(memfd_create("foreign", MFD_CLOEXEC));
    const int sent[] = {memory.get(), STDIN_FILENO, socket.get()};
    iovec data = {.iov_base = &hello, .iov_len = sizeof(hello)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(sent))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(sent));
    memcpy(CMSG_DATA(header), sent, sizeof(sent));
    ASSERT_EQ(sendmsg(socket.get(), &message, 0), static_cast<ssize_t>(sizeof(hello)));
    AttachFrame answer;
    ASSERT_EQ(recv(socket.get(), &answer, sizeof(answer), 0), static_cast<ssize_t>(sizeof(answer)));
    EXPECT_THAT(answer.type, AnyOf(AttachType::kWelcome, AttachType::kError));
    // This connection and its pidfd, and nothing of what was sent.
    EXPECT_LE(daemon().Use().descriptors, before + 2) << DescriptorsOf(daemon().pid());
  }
  EXPECT_TRUE(Eventually([&] { return daemon().Use().descriptors <= before; }));
}

TEST_F(Buffers, FramesOfNoSenseAreAnsweredByAnErrorOrAHangUp) {
  std::mt19937 random(20240607);
  printf("seed 20240607\n");
  for (int round = 0; round < 200; ++round) {
    UniqueFd socket = RawAttach();
    AttachFrame frame;
    frame.type = AttachType::kHello;
    strcpy(frame.client, "nonsense");
    size_t bytes = sizeof(frame);
    switch (round % 8) {
      case 0: frame.magic = random(); break;
      case 1: frame.version = 2; break;
      case 2: frame.type = static_cast<AttachType>(random()); break;
      case 3: bytes = random() % sizeof(frame); break;
      case 4: memset(frame.client, 'x', sizeof(frame.client)); break;
      case 5: frame.type = AttachType::kFetch; break;  // before HELLO
      case 6: frame.type = AttachType::kWelcome; break;
      case 7:
        for (size_t i = 0; i < sizeof(frame); ++i)
          reinterpret_cast<unsigned char*>(&frame)[i] = random();
        break;
    }
    if (bytes > 0) {
      ASSERT_EQ(send(socket.get(), &frame, bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
    }
    if (bytes == 0) continue;
    AttachFrame answer;
    const ssize_t received = recv(socket.get(), &answer, sizeof(answer), 0);
    ASSERT_GE(received, 0) << "no answer to case " << round % 8 << ": " << strerror(errno);
    if (received > 0) {
      EXPECT_EQ(answer.type, AttachType::kError) << round % 8;
    }
  }
}

TEST_F(Buffers, AnothersArenaIsNotHandedOut) {
  Configure("mine");
  auto other = Connection::Open(endpoint());
  ASSERT_TRUE(other.ok());
  client::AttachSocket& attach = *(*other)->impl().attach;
  const uint64_t id = session_->impl().id;
  EXPECT_EQ(attach.Fetch(id, 0, ArenaKind::kGrad).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(attach.Fetch(id + 1000, 0, ArenaKind::kGrad).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(connection_->impl().attach->Fetch(id, 1, ArenaKind::kGrad).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(attach.Fetch(id, 0, ArenaKind::kUnspecified).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(Buffers, AnArenaIsThereOnlyOnceTheSessionIsConfigured) {
  auto connection = Connection::Open(endpoint());
  auto session = (*connection)->OpenSession(SmallTable({.job = "early"}, 0));
  ASSERT_TRUE(session.ok());
  EXPECT_EQ((*connection)
                ->impl()
                .attach->Fetch((*session)->impl().id, 0, ArenaKind::kGrad)
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*session)->Start().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(Buffers, AnotherAttachmentCannotSpeakForARank) {
  Configure("spoken-for");
  auto other = Connection::Open(endpoint());
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(Register(TrueRequest(), other->get()).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(session_->Start().ok());
}

TEST_F(Buffers, AStaleTokenIsRefused) {
  auto connection = Connection::Open(endpoint());
  ASSERT_TRUE(connection.ok());
  const std::string token = (*connection)->impl().attach->token();
  EXPECT_NE(CallWithToken(token).code(), absl::StatusCode::kUnauthenticated);
  connection->reset();
  EXPECT_TRUE(Eventually(
      [&] { return CallWithToken(token).code() == absl::StatusCode::kUnauthenticated; }));
}

TEST_F(Buffers, NoTokenAnInventedOneAndAMalformedOneAreRefused) {
  for (const std::string& token :
       {std::string(), std::string(32, '0'), std::string("zz"), std::string(4000, 'a')}) {
    const absl::Status status = CallWithToken(token);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  }
}

}  // namespace
}  // namespace dmuon::testing
