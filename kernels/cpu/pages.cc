#include "kernels/cpu/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace dmuon::kernels::cpu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

// In the page before the memory that was handed out.
struct Header {
  size_t bytes;  // of what was handed out, in whole pages
};

size_t PhysicalMemory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void Unmap(std::byte* begin, const std::byte* end) {
  if (begin < end) munmap(begin, static_cast<size_t>(end - begin));
}

}  // namespace

void* AllocatePages(size_t bytes) {
  // More than the machine has would be granted all the same, and the process killed when it is written to.
  if (bytes > PhysicalMemory()) return nullptr;
  const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
  const size_t alignment = bytes >= kHugePage ? kHugePage : kPage;
  const size_t total = rounded + alignment + kPage;
  void* mapped = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapped);
  const auto first = reinterpret_cast<uintptr_t>(begin) + kPage;
  std::byte* const memory = begin + kPage + (alignment - first % alignment) % alignment;
  Unmap(begin, memory - kPage);
  Unmap(memory + rounded, begin + total);
  if (alignment == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
  reinterpret_cast<Header*>(memory - kPage)->bytes = rounded;
  std::memset(memory, 0, rounded);  // no page is missing in a step
  return memory;
}

void FreePages(void* memory) {
  if (memory == nullptr) return;
  auto* const begin = static_cast<std::byte*>(memory);
  const size_t bytes = reinterpret_cast<const Header*>(begin - kPage)->bytes;
  Unmap(begin - kPage, begin + bytes);
}

}  // namespace dmuon::kernels::cpu
