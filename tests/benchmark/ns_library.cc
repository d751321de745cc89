// The Newton-Schulz of the CPU backend behind a C interface, so that ns.py can time it and torch's in one process, turn
// by turn on the same cores. All functions return 0, or -1 with the reason in ns_error().
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/newton_schulz/coefficients.h"
#include "kernels/newton_schulz/newton_schulz.h"
#include "tests/benchmark/peak.h"

namespace {

using dmuon::Dtype;
namespace kernels = dmuon::kernels;

std::string& Error() {
  static thread_local std::string error;
  return error;
}

int Failed(const absl::Status& status) {
  Error() = std::string(status.message());
  return -1;
}

struct Plan {
  kernels::Backend* backend;
  std::unique_ptr<kernels::NewtonSchulz> newton_schulz;
  void* workspace = nullptr;
  std::string kernel;
  ~Plan() { backend->Free(workspace); }
};

}  // namespace

extern "C" {

const char* ns_error() { return Error().c_str(); }

int ns_backend(const char* kernel, int threads, void** backend) {
  auto made = kernels::CreateCpuBackend({.threads = threads, .kernel = kernel});
  if (!made.ok()) return Failed(made.status());
  *backend = made->release();
  return 0;
}

void ns_backend_free(void* backend) { delete static_cast<kernels::Backend*>(backend); }

// form: 0 gram, 1 direct; dtype: 0 the default, else a Dtype; set: 0 Polar Express, 1 You, 2 Jordan.
int ns_plan(void* backend, int form, int dtype, int set, int64_t rows, int64_t cols, void** plan) {
  kernels::NewtonSchulzOptions options;
  options.form = form == 0 ? kernels::NsForm::kGram : kernels::NsForm::kDirect;
  if (dtype != 0) options.iteration_dtype = static_cast<Dtype>(dtype);
  if (set != 0) {
    const auto chosen = set == 1 ? kernels::You() : kernels::Jordan();
    options.coefficients.assign(chosen.begin(), chosen.end());
  }
  auto& on = *static_cast<kernels::Backend*>(backend);
  auto made = kernels::PlanNewtonSchulz(on, options, rows, cols);
  if (!made.ok()) return Failed(made.status());
  auto workspace = on.Allocate((*made)->workspace_bytes());
  if (!workspace.ok()) return Failed(workspace.status());
  *plan = new Plan{&on, *std::move(made), *workspace, ""};
  static_cast<Plan*>(*plan)->kernel = static_cast<Plan*>(*plan)->newton_schulz->kernel();
  return 0;
}

void ns_plan_free(void* plan) { delete static_cast<Plan*>(plan); }

const char* ns_kernel(void* plan) { return static_cast<Plan*>(plan)->kernel.c_str(); }

void ns_run(void* plan, const float* in, float* out) {
  auto* made = static_cast<Plan*>(plan);
  made->newton_schulz->Run({}, in, out, made->workspace);
}

// The kernel that the processor runs best, and its description.
int ns_best_kernel(char* name, int size) {
  const auto table = kernels::cpu::FindKernels("");
  if (!table.ok()) return Failed(table.status());
  std::strncpy(name, (*table)->name, size);
  return 0;
}

// FLOP/s of `threads` cores at once.
double ns_peak(const char* kernel, int bf16, int threads) {
  std::vector<double> peaks(threads);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([&, i] { peaks[i] = dmuon::PeakFlops(kernel, bf16 != 0); });
  }
  peaks[0] = dmuon::PeakFlops(kernel, bf16 != 0);
  for (std::thread& other : others) other.join();
  double sum = 0;
  for (double peak : peaks) sum += peak;
  return sum;
}

}  // extern "C"
