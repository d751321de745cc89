#include "tests/fakes/cuda_on_cpu.h"

#include <sys/mman.h>

#include <memory>

#ifndef __x86_64__
#error "fibers switch by x86-64 code"
#endif

// Saves the callee's registers and stack of who calls, goes on where `to` was saved. By hand: swapcontext makes a system call
// each time, and a kernel switches at every barrier of every thread.
extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
.text
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");

namespace cuda_on_cpu {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kMostThreads = 1024;

constexpr size_t kSavedRegisters = 6;

struct Fiber {
  void* saved = nullptr;  // its stack pointer while it does not run
  char* stack = nullptr;
  uint3 thread{};
  bool done = true;
};

struct Block {
  unsigned live = 0, arrived = 0;
  uint64_t round = 0;
  int line = 0;
  bool moved = false;  // since the scheduler last looked
  std::vector<Warp> warps;
};

Now g_now;
Block g_block;
std::vector<Fiber> g_fibers(kMostThreads);
void* g_scheduler = nullptr;
const std::function<void()>* g_thread = nullptr;

[[noreturn]] void Die(const char* what, int line, int other) {
  std::fprintf(stderr, "cuda_on_cpu: %s (lines %d and %d) in block (%u, %u)\n", what, line, other,
               g_now.block.x, g_now.block.y);
  std::abort();
}

bool Reverse() {
  static const bool reverse = [] {
    const char* order = std::getenv("DMUON_FAKE_ORDER");
    return order != nullptr && std::strcmp(order, "reverse") == 0;
  }();
  return reverse;
}

// Back to the scheduler; returns when this fiber's turn comes again.
void Yield() { cuda_on_cpu_switch(&g_fibers[g_now.flat].saved, g_scheduler); }

void Release(Block& block) {
  block.arrived = 0;
  ++block.round;
}

void Release(Warp& warp) {
  warp.arrived = 0;
  ++warp.round;
}

void Entry() {
  (*g_thread)();
  Fiber& self = g_fibers[g_now.flat];
  self.done = true;
  g_block.moved = true;
  Warp& warp = CurrentWarp();
  // Threads that have left count as arrived, as on current GPUs.
  if (--warp.live > 0 && warp.arrived == warp.live) Release(warp);
  if (--g_block.live > 0 && g_block.arrived == g_block.live) Release(g_block);
  cuda_on_cpu_switch(&self.saved, g_scheduler);
}

void StartFiber(unsigned flat) {
  Fiber& fiber = g_fibers[flat];
  if (fiber.stack == nullptr) {
    fiber.stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  const dim3 dim = g_now.block_dim;
  fiber.thread = {flat % dim.x, flat / dim.x % dim.y, flat / (dim.x * dim.y)};
  fiber.done = false;
  // Staggered, or all stacks would lie in the same lines of the cache.
  auto** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - flat % 32 * 128);
  // As if Entry had been called: above its address the stack is aligned to 16.
  top[-2] = reinterpret_cast<void*>(&Entry);
  fiber.saved = top - 2 - kSavedRegisters;
}

void RunBlock(unsigned threads) {
  g_block.live = threads;
  g_block.arrived = 0;
  g_block.line = 0;
  g_block.warps.assign((threads + 31) / 32, Warp{});
  for (unsigned i = 0; i < threads; ++i) {
    ++g_block.warps[i / 32].live;
    StartFiber(i);
  }
  while (g_block.live > 0) {
    g_block.moved = false;
    for (unsigned j = 0; j < threads; ++j) {
      const unsigned i = Reverse() ? threads - 1 - j : j;
      if (g_fibers[i].done) continue;
      g_now.flat = i;
      g_now.thread = g_fibers[i].thread;
      cuda_on_cpu_switch(&g_scheduler, g_fibers[i].saved);
    }
    if (!g_block.moved && g_block.live > 0)
      Die("a barrier that some threads never reach", g_block.line, 0);
  }
}

}  // namespace

Now& now() { return g_now; }

Warp& CurrentWarp() { return g_block.warps[g_now.flat / 32]; }

std::map<std::string, Launch>& Kernels() {
  static auto* const kernels = new std::map<std::string, Launch>();
  return *kernels;
}

void BlockBarrier(int line) {
  if (g_block.arrived > 0 && g_block.line != line)
    Die("threads of one block at different barriers", g_block.line, line);
  g_block.line = line;
  g_block.moved = true;
  const uint64_t round = g_block.round;
  if (++g_block.arrived == g_block.live) {
    Release(g_block);
  }
  while (g_block.round == round) Yield();
}

void WarpBarrier() {
  Warp& warp = CurrentWarp();
  g_block.moved = true;
  const uint64_t round = warp.round;
  if (++warp.arrived == warp.live) Release(warp);
  while (warp.round == round) Yield();
}

void RunGrid(dim3 grid, dim3 block, const std::function<void()>& thread) {
  g_thread = &thread;
  g_now.grid_dim = grid;
  g_now.block_dim = block;
  const unsigned threads = block.x * block.y * block.z;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  for (uint64_t n = 0; n < blocks; ++n) {
    const uint64_t b = Reverse() ? blocks - 1 - n : n;
    g_now.block = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                   static_cast<unsigned>(b / grid.x / grid.y)};
    RunBlock(threads);
  }
}

}  // namespace cuda_on_cpu

// What the stand-in for the CUDA runtime calls.
extern "C" __attribute__((visibility("default"))) cuda_on_cpu::Launch cuda_on_cpu_find(
    const char* name) {
  const auto found = cuda_on_cpu::Kernels().find(name);
  return found != cuda_on_cpu::Kernels().end() ? found->second : nullptr;
}
