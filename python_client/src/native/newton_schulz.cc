// Newton-Schulz in this process, over the same kernels as the daemon's.
#include "kernels/newton_schulz/newton_schulz.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "client/dmuon/client.h"
#include "kernels/ops/backend.h"
#include "python_client/src/native/module.h"
#include "python_client/src/native/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dmuon::python {
namespace {

using Matrices = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

kernels::NewtonSchulzOptions Convert(const client::NewtonSchulzOptions& from) {
  kernels::NewtonSchulzOptions to;
  to.form = from.form == client::NsForm::kGram ? kernels::NsForm::kGram : kernels::NsForm::kDirect;
  to.steps = from.steps;
  to.coefficients = from.coefficients;
  to.restarts = from.restarts;
  if (from.iteration_dtype.has_value()) {
    to.iteration_dtype = static_cast<dmuon::Dtype>(*from.iteration_dtype);
  }
  to.deterministic = from.deterministic;
  to.tf32 = from.tf32;
  return to;
}
static_assert(static_cast<int>(client::Dtype::kF32) == static_cast<int>(dmuon::Dtype::kF32) &&
              static_cast<int>(client::Dtype::kBF16) == static_cast<int>(dmuon::Dtype::kBF16) &&
              static_cast<int>(client::Dtype::kF16) == static_cast<int>(dmuon::Dtype::kF16));

// For tensors in host memory. `threads` as torch has them when it is first used.
kernels::Backend& Backend(int threads) {
  static nb::ft_mutex mutex;
  static kernels::Backend* backend = nullptr;  // for the life of the process
  nb::ft_lock_guard lock(mutex);
  if (backend == nullptr) {
    backend = ValueOrThrow(kernels::CreateBackend("cpu", threads)).release();
  }
  return *backend;
}

absl::StatusOr<std::string> Orthogonalize(kernels::Backend& backend,
                                          const kernels::NewtonSchulzOptions& options,
                                          const Matrices& in, Matrices& out) {
  const int64_t rows = in.shape(1), cols = in.shape(2);
  absl::StatusOr<std::unique_ptr<kernels::NewtonSchulz>> plan =
      kernels::PlanNewtonSchulz(backend, options, rows, cols);
  if (!plan.ok()) return plan.status();
  absl::StatusOr<void*> workspace = backend.Allocate((*plan)->workspace_bytes());
  if (!workspace.ok()) return workspace.status();
  absl::StatusOr<kernels::Stream> stream = backend.CreateStream();
  absl::Status status = stream.status();
  if (stream.ok()) {
    for (size_t i = 0; i < in.shape(0); ++i) {
      (*plan)->Run(*stream, in.data() + i * rows * cols, out.data() + i * rows * cols, *workspace);
    }
    status = backend.Synchronize(*stream);
    backend.DestroyStream(*stream);
  }
  backend.Free(*workspace);
  if (!status.ok()) return status;
  return (*plan)->kernel();
}

}  // namespace

void BindNewtonSchulz(nb::module_& m) {
  m.def(
      "newton_schulz",
      [](Matrices in, Matrices out, const client::NewtonSchulzOptions& options, int threads) {
        kernels::Backend& backend = Backend(threads);
        const kernels::NewtonSchulzOptions converted = Convert(options);
        ThrowIfError(kernels::Validate(converted));
        absl::StatusOr<std::string> kernel = [&] {
          nb::gil_scoped_release release;
          return Orthogonalize(backend, converted, in, out);
        }();
        return ValueOrThrow(std::move(kernel));
      },
      "matrices"_a, "out"_a, "options"_a, "threads"_a,
      "out[i] = NS(matrices[i]) for a batch of fp32 matrices; answers with the name of the "
      "kernel.");
  m.def(
      "validate_newton_schulz",
      [](const client::NewtonSchulzOptions& options) {
        ThrowIfError(kernels::Validate(Convert(options)));
      },
      "options"_a);
  m.def(
      "backend_description", [](int threads) { return Backend(threads).description(); },
      "threads"_a);
}

}  // namespace dmuon::python
