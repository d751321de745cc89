#include "tests/server/rpc/raw_client.h"

#include <fcntl.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace dmuon::server::rpc {
namespace {

grpc::ByteBuffer Bytes(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

std::string Text(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (buffer.Dump(&slices).ok()) {
    for (const grpc::Slice& s : slices)
      text.append(reinterpret_cast<const char*>(s.begin()), s.size());
  }
  return text;
}

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// One request, one response, of a call of any kind.
absl::StatusOr<std::string> Exchange(const std::shared_ptr<grpc::Channel>& channel,
                                     const std::string& method, const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(&context, method, &queue);
  void* tag;
  bool ok = false;
  const auto wait = [&] { return queue.Next(&tag, &ok) && ok; };
  call->StartCall(nullptr);
  wait();
  call->Write(Bytes(request), nullptr);
  wait();
  call->WritesDone(nullptr);
  wait();
  grpc::ByteBuffer response;
  call->Read(&response, nullptr);
  const bool answered = wait();
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  if (!answered || !status.ok()) return ToAbsl(status);
  return Text(response);
}

}  // namespace

std::shared_ptr<grpc::Channel> Dial(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

std::shared_ptr<grpc::Channel> DialAs(uid_t uid, const std::string& socket) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, socket.data(), socket.size());
  // The system call, unlike seteuid(3), is about this thread alone; the kernel records who connects.
  if (syscall(SYS_setresuid, -1, uid, -1) != 0) std::abort();
  const int connected = connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
  if (syscall(SYS_setresuid, -1, 0, -1) != 0) std::abort();
  if (connected != 0) std::abort();
  if (fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) std::abort();
  return grpc::CreateInsecureChannelFromFd("fd", fd.Release());
}

absl::StatusOr<std::vector<std::string>> ListServices(
    const std::shared_ptr<grpc::Channel>& channel) {
  // The reflection plugin, which is linked here too, registers its messages.
  using google::protobuf::DescriptorPool;
  using google::protobuf::MessageFactory;
  const auto* type = DescriptorPool::generated_pool()->FindMessageTypeByName(
      "grpc.reflection.v1alpha.ServerReflectionResponse");
  const std::string list_services = "\x3a\x01*";  // field 7, a string
  absl::StatusOr<std::string> text = Exchange(
      channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", list_services);
  if (!text.ok()) return text.status();
  const std::unique_ptr<google::protobuf::Message> response(
      MessageFactory::generated_factory()->GetPrototype(type)->New());
  if (!response->ParseFromString(*text)) return absl::DataLossError("no ServerReflectionResponse");
  const auto& list = response->GetReflection()->GetMessage(
      *response, type->FindFieldByName("list_services_response"));
  const auto* services = list.GetDescriptor()->FindFieldByName("service");
  std::vector<std::string> names;
  for (int i = 0; i < list.GetReflection()->FieldSize(list, services); ++i) {
    const auto& service = list.GetReflection()->GetRepeatedMessage(list, services, i);
    names.push_back(service.GetReflection()->GetString(
        service, service.GetDescriptor()->FindFieldByName("name")));
  }
  return names;
}

absl::StatusOr<Health> CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                                   const std::string& service) {
  // HealthCheckRequest{string service = 1}, HealthCheckResponse{ServingStatus status = 1}.
  const std::string request =
      service.empty()
          ? ""
          : absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
  absl::StatusOr<std::string> text = Exchange(channel, "/grpc.health.v1.Health/Check", request);
  if (!text.ok()) return text.status();
  if (text->empty()) return Health::kUnknown;
  if (text->size() != 2 || (*text)[0] != '\x08')
    return absl::DataLossError("no HealthCheckResponse");
  return static_cast<Health>((*text)[1]);
}

}  // namespace dmuon::server::rpc
