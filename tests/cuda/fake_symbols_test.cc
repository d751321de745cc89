// Opens the libraries named by its arguments with every symbol bound at once: what the stand-ins lack shows here, by name, and
// not in the middle of some other test.
#include <dlfcn.h>

#include <cstdio>

int main(int argc, char** argv) {
  int failed = argc < 2 ? 1 : 0;
  for (int i = 1; i < argc; ++i) {
    if (dlopen(argv[i], RTLD_NOW | RTLD_LOCAL) != nullptr) continue;
    std::fprintf(stderr, "%s\n", dlerror());
    failed = 1;
  }
  return failed;
}
