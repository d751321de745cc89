#include "tests/cuda/cuda_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>

#include "tests/fakes/fake_cudart.h"

extern char** environ;

namespace dmuon::cuda {
namespace {

constexpr char kFlag[] = "--cuda-process";

std::string ToHex(const void* data, size_t bytes) {
  std::string hex;
  for (size_t i = 0; i < bytes; ++i) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<const unsigned char*>(data)[i]);
    hex += two;
  }
  return hex;
}

void FromHex(const std::string& hex, void* data, size_t bytes) {
  for (size_t i = 0; i < bytes && 2 * i + 1 < hex.size(); ++i)
    static_cast<unsigned char*>(data)[i] =
        static_cast<unsigned char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
}

using Words = std::istringstream;

char* Address(Words& words) {
  uintptr_t address = 0;
  words >> std::hex >> address >> std::dec;
  return reinterpret_cast<char*>(address);
}

long Number(Words& words) {
  long number = 0;
  words >> number;
  return number;
}

std::string Text(const void* address) {
  std::ostringstream text;
  text << std::hex << reinterpret_cast<uintptr_t>(address);
  return text.str();
}

cudaStream_t Stream() {
  static cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    (void)cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
    return made;
  }();
  return stream;
}

Reply Properties(Words& words) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, static_cast<int>(Number(words)));
  return {error,
          error != cudaSuccess ? "" : ToHex(properties.uuid.bytes, 16) + " " + properties.name};
}

Reply Open(Words& words) {
  std::string hex;
  words >> hex;
  cudaIpcMemHandle_t handle;
  FromHex(hex, &handle, sizeof(handle));
  unsigned flags = cudaIpcMemLazyEnablePeerAccess;
  words >> flags;
  void* memory = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&memory, handle, flags);
  return {error, Text(memory)};
}

Reply Attributes(Words& words) {
  cudaPointerAttributes attributes;
  const cudaError_t error = cudaPointerGetAttributes(&attributes, Address(words));
  return {error, std::to_string(attributes.type) + " " + std::to_string(attributes.device)};
}

// Reads one byte, by a copy to pageable memory.
Reply Peek(Words& words) {
  const char* at = Address(words);
  at += Number(words);
  unsigned char byte = 0;
  const cudaError_t error = cudaMemcpyAsync(&byte, at, 1, cudaMemcpyDeviceToHost, Stream());
  return {error, std::to_string(byte)};
}

const std::map<std::string, std::function<Reply(Words&)>>& Commands() {
  static const auto* const commands = new std::map<std::string, std::function<Reply(Words&)>>{
      {"count",
       [](Words&) {
         int count = -1;
         const cudaError_t error = cudaGetDeviceCount(&count);
         return Reply{error, std::to_string(count)};
       }},
      {"set",
       [](Words& w) {
         return Reply{cudaSetDevice(static_cast<int>(Number(w))), ""};
       }},
      {"properties", Properties},
      {"malloc",
       [](Words& w) {
         void* memory = nullptr;
         const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(Number(w)));
         return Reply{error, Text(memory)};
       }},
      {"pool",
       [](Words& w) {
         void* memory = nullptr;
         const cudaError_t error =
             cudaMallocAsync(&memory, static_cast<size_t>(Number(w)), Stream());
         return Reply{error, Text(memory)};
       }},
      {"free",
       [](Words& w) {
         return Reply{cudaFree(Address(w)), ""};
       }},
      {"fill",  // address value bytes; enqueued only
       [](Words& w) {
         char* at = Address(w);
         const int value = static_cast<int>(Number(w));
         return Reply{cudaMemsetAsync(at, value, static_cast<size_t>(Number(w)), Stream()), ""};
       }},
      {"sync",
       [](Words&) {
         return Reply{cudaStreamSynchronize(Stream()), ""};
       }},
      {"peek", Peek},
      {"handle",
       [](Words& w) {
         cudaIpcMemHandle_t handle = {};
         const cudaError_t error = cudaIpcGetMemHandle(&handle, Address(w));
         return Reply{error, ToHex(&handle, sizeof(handle))};
       }},
      {"open", Open},
      {"close",
       [](Words& w) {
         return Reply{cudaIpcCloseMemHandle(Address(w)), ""};
       }},
      {"attributes", Attributes},
      {"peer",
       [](Words& w) {
         const int device = static_cast<int>(Number(w));
         int can = -1;
         const cudaError_t error =
             cudaDeviceCanAccessPeer(&can, device, static_cast<int>(Number(w)));
         return Reply{error, std::to_string(can)};
       }},
      {"enable",
       [](Words& w) {
         return Reply{cudaDeviceEnablePeerAccess(static_cast<int>(Number(w)), 0), ""};
       }},
      {"imports",
       [](Words&) {
         return Reply{cudaSuccess, std::to_string(fake_cuda_counters().imports)};
       }},
      {"fork",  // what the first call in a forked child answers
       [](Words&) {
         const pid_t child = fork();
         if (child == 0) {
           int count = 0;
           _exit(cudaGetDeviceCount(&count));
         }
         int status = 0;
         (void)waitpid(child, &status, 0);
         return Reply{static_cast<cudaError_t>(WEXITSTATUS(status)), ""};
       }},
  };
  return *commands;
}

}  // namespace

bool IsCudaProcess(int argc, char** argv) { return argc == 2 && std::strcmp(argv[1], kFlag) == 0; }

int RunCudaProcess() {
  for (std::string line; std::getline(std::cin, line);) {
    Words words(line);
    std::string name;
    words >> name;
    const Reply reply = Commands().at(name)(words);
    std::cout << static_cast<int>(reply.error) << " " << reply.value << std::endl;
  }
  return 0;
}

CudaProcess::CudaProcess(const std::vector<std::string>& environment) {
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  std::vector<char*> variables;
  for (const std::string& added : environment)
    variables.push_back(const_cast<char*>(added.c_str()));
  for (char** e = environ; *e != nullptr; ++e) variables.push_back(*e);  // the first one counts
  variables.push_back(nullptr);
  std::string self = "/proc/self/exe", flag = kFlag;
  char* arguments[] = {self.data(), flag.data(), nullptr};
  (void)posix_spawn(&pid_, self.c_str(), &actions, nullptr, arguments, variables.data());
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  in_ = in[1];
  out_ = out[0];
}

CudaProcess::~CudaProcess() {
  if (pid_ > 0) Kill();
  close(in_);
  close(out_);
}

Reply CudaProcess::Ask(const std::string& command) {
  const std::string line = command + "\n";
  // A dead process is an answer here; its pipe must not be our end.
  static const auto ignored = signal(SIGPIPE, SIG_IGN);
  (void)ignored;
  if (write(in_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) return {};
  while (buffer_.find('\n') == std::string::npos) {
    char text[4096];
    const ssize_t length = read(out_, text, sizeof(text));
    if (length <= 0) return {};
    buffer_.append(text, static_cast<size_t>(length));
  }
  const size_t end = buffer_.find('\n'), space = buffer_.find(' ');
  const Reply reply = {static_cast<cudaError_t>(std::stoi(buffer_.substr(0, space))),
                       buffer_.substr(space + 1, end - space - 1)};
  buffer_.erase(0, end + 1);
  return reply;
}

std::string CudaProcess::Do(const std::string& command) {
  const Reply reply = Ask(command);
  EXPECT_EQ(reply.error, cudaSuccess) << command;
  return reply.value;
}

int CudaProcess::Wait() {
  int status = 0;
  if (waitpid(pid_, &status, 0) != pid_) return -1;
  pid_ = -1;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void CudaProcess::Kill() {
  kill(pid_, SIGKILL);
  (void)Wait();
}

int CudaProcess::End() {
  close(in_);
  in_ = -1;
  return Wait();
}

}  // namespace dmuon::cuda
