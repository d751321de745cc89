#include "kernels/cuda/loader.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "kernels/cuda/module.h"

namespace dmuon::cuda {
namespace {

std::string Folder(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string Executable() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  return length > 0 ? std::string(path, static_cast<size_t>(length)) : std::string();
}

std::string ThisLibrary() {
  Dl_info info = {};
  return dladdr(reinterpret_cast<const void*>(&ModulePlaces), &info) != 0 &&
                 info.dli_fname != nullptr
             ? info.dli_fname
             : "";
}

}  // namespace

std::vector<std::string> ModulePlaces() {
  std::vector<std::string> places;
  for (const std::string& file : {Executable(), ThisLibrary()}) {
    // In an executable, dladdr gives what it was started as: a bare name would mean the working directory.
    if (file.empty() || file[0] != '/') continue;
    for (const std::string& place : {Folder(file), absl::StrCat(Folder(file), "/../lib")}) {
      if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
    }
  }
  return places;
}

absl::StatusOr<void*> OpenModule(absl::string_view file, const char* entry,
                                 absl::Span<const std::string> places) {
  for (const std::string& place : places) {
    const std::string path = absl::StrCat(place, "/", file);
    if (access(path.c_str(), R_OK) != 0) continue;
    // All symbols now, so that a CUDA library of another version is found here and not inside a step; and none of them for
    // others, so that the process's own CUDA libraries stay its own.
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      return absl::UnavailableError(absl::StrCat("cannot load ", file, ": ", dlerror()));
    void* found = dlsym(library, entry);
    if (found == nullptr)
      return absl::FailedPreconditionError(absl::StrCat(path, " has no ", entry));
    return found;
  }
  return absl::UnavailableError(absl::StrCat("no ", file, " in ", absl::StrJoin(places, ", ")));
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> LoadBackend(int device) {
  return LoadBackend(device, ModulePlaces());
}

absl::StatusOr<std::unique_ptr<kernels::Backend>> LoadBackend(
    int device, absl::Span<const std::string> places) {
  ASSIGN_OR_RETURN(void* const entry, OpenModule(kModuleFile, kModuleEntry, places));
  const auto open = reinterpret_cast<ModuleEntry>(entry);
  int code = static_cast<int>(absl::StatusCode::kInternal);
  char why[512] = {};
  kernels::Backend* backend = open(kModuleAbi, device, &code, why, sizeof(why));
  if (backend == nullptr) return absl::Status(static_cast<absl::StatusCode>(code), why);
  return std::unique_ptr<kernels::Backend>(backend);
}

}  // namespace dmuon::cuda
