// A process of its own that makes CUDA calls by order of a test: what one process cannot show of rules between several.
#ifndef DMUON_TESTS_CUDA_CUDA_PROCESS_H_
#define DMUON_TESTS_CUDA_CUDA_PROCESS_H_

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace dmuon::cuda {

// A call's code, and what it gave as text.
struct Reply {
  cudaError_t error = cudaErrorUnknown;
  std::string value;
};

class CudaProcess {
 public:
  // This executable again, with this environment added ("NAME=value").
  explicit CudaProcess(const std::vector<std::string>& environment = {});
  ~CudaProcess();
  CudaProcess(const CudaProcess&) = delete;
  CudaProcess& operator=(const CudaProcess&) = delete;

  pid_t pid() const { return pid_; }
  // One command of the list in cuda_process.cc. An error of cudaErrorUnknown and no value: the process is dead.
  Reply Ask(const std::string& command);
  // The same for a call that must succeed; fails the test with the command when it does not.
  std::string Do(const std::string& command);
  void Kill();
  // Ends its commands and waits: the exit code, or 128 + signal.
  int End();

 private:
  int Wait();

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
  std::string buffer_;
};

// The other side: reads commands from stdin until its end. To be called from main when CudaProcess started it.
bool IsCudaProcess(int argc, char** argv);
int RunCudaProcess();

}  // namespace dmuon::cuda

#endif  // DMUON_TESTS_CUDA_CUDA_PROCESS_H_
