// What was called and what was not given back, at the end of the process.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fakes/cudart_world.h"

namespace dmuon_fakes {
namespace {

constexpr int kLeakExitCode = 99;

const char* Name(Memory::Kind kind) {
  switch (kind) {
    case Memory::Kind::kDevice: return "device memory";
    case Memory::Kind::kPool: return "memory of a pool";
    case Memory::Kind::kImported: return "an open import";
    case Memory::Kind::kHost: return "page-locked memory";
  }
  return "";
}

void WriteReport(const char* path, const FakeCudaCounters& c, const std::string& leaks) {
  FILE* file = std::fopen((std::string(path) + "." + std::to_string(getpid())).c_str(), "w");
  if (file == nullptr) return;
  std::fprintf(
      file,
      "{\"allocations\": %lu, \"frees\": %lu, \"live_bytes\": %lu, \"streams\": %lu, "
      "\"events\": %lu, \"graphs\": %lu, \"created\": %lu, \"launches\": %lu, "
      "\"lazy_loads\": %lu, \"waits\": %lu, \"default_stream_uses\": %lu, \"imports\": %lu, "
      "\"imports_opened\": %lu, \"imports_closed\": %lu, \"calls\": {",
      c.allocations, c.frees, c.live_bytes, c.streams, c.events, c.graphs, c.created, c.launches,
      c.lazy_loads, c.waits, c.default_stream_uses, c.imports, c.imports_opened, c.imports_closed);
  const char* separator = "";
  for (const auto& [function, calls] : FaultScript::Get().AllCalls()) {
    std::fprintf(file, "%s\"%s\": %lu", separator, function.c_str(), calls);
    separator = ", ";
  }
  std::fprintf(file, "}, \"leaks\": [");
  separator = "\"";
  for (size_t begin = 0; begin < leaks.size();) {
    const size_t end = leaks.find('\n', begin);
    std::fprintf(file, "%s%s\"", separator, leaks.substr(begin, end - begin).c_str());
    separator = ", \"";
    begin = end + 1;
  }
  std::fprintf(file, "]}\n");
  std::fclose(file);
}

// After everything that uses this library: what is alive now stays so.
__attribute__((destructor)) void AtTheEnd() {
  World& w = W();
  if (w.pid != getpid()) return;  // never used, or a forked child
  const char* report = std::getenv("DMUON_FAKE_CUDA_REPORT");
  const char* leaking = std::getenv("DMUON_FAKE_CUDA_LEAKS");
  if (report == nullptr && leaking == nullptr) return;
  const FakeCudaCounters counters = fake_cuda_counters();
  std::string leaks;
  {
    std::lock_guard lock(w.mutex);
    leaks = LeakReport();
  }
  if (report != nullptr) WriteReport(report, counters, leaks);
  if (leaking == nullptr || std::strcmp(leaking, "fail") != 0 || leaks.empty()) return;
  std::fprintf(stderr, "fake_cudart: not given back:\n%s", leaks.c_str());
  std::fflush(nullptr);
  _exit(kLeakExitCode);
}

}  // namespace

size_t CopyOut(const std::string& text, char* to, size_t bytes) {
  if (bytes > 0) {
    const size_t length = std::min(bytes - 1, text.size());
    std::memcpy(to, text.data(), length);
    to[length] = 0;
  }
  return text.size();
}

std::string LeakReport() {
  World& w = W();
  std::string text;
  for (const auto& [first, memory] : w.memory)
    text += std::string(Name(memory.kind)) + ", " + std::to_string(memory.bytes) + " bytes\n";
  const auto add = [&](size_t count, const char* what) {
    if (count > 0) text += std::to_string(count) + " " + what + "\n";
  };
  add(w.streams.size(), "streams");
  add(w.events.size(), "events");
  add(w.graphs.size(), "graphs");
  add(w.executables.size(), "executable graphs");
  return text;
}

}  // namespace dmuon_fakes

extern "C" size_t fake_cuda_leaks(char* text, size_t bytes) {
  std::lock_guard lock(dmuon_fakes::W().mutex);
  return dmuon_fakes::CopyOut(dmuon_fakes::LeakReport(), text, bytes);
}
