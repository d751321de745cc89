// Opens the libraries named by its arguments with every symbol bound at once: what the stand-ins lack shows here, by name, and
// not in the middle of some other test. The client library links no CUDA library, so it is asked to find its functions.
#include <dlfcn.h>

#include <cstdio>

#include "client/cuda_runtime.h"

int main(int argc, char** argv) {
  int failed = argc < 2 ? 1 : 0;
  for (int i = 1; i < argc; ++i) {
    if (dlopen(argv[i], RTLD_NOW | RTLD_LOCAL) != nullptr) continue;
    std::fprintf(stderr, "%s\n", dlerror());
    failed = 1;
  }
  if (const auto client = dmuon::client::CudaRuntime::Load(); !client.ok()) {
    std::fprintf(stderr, "client: %s\n", client.status().ToString().c_str());
    failed = 1;
  }
  return failed;
}
