// Connection and Session. Every call that can wait releases the GIL, and looks for signals while it waits.
#include "client/dmuon/client.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python_client/src/native/module.h"
#include "python_client/src/native/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dmuon::python {
namespace {

using client::Connection;
using client::Session;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename F>
auto WithoutGil(F&& f) {
  nb::gil_scoped_release release;
  return f();
}

// Runs `f`, which returns absl::Status, without the GIL.
template <typename F>
void Call(F&& f) {
  ThrowIfError(WithoutGil(std::forward<F>(f)));
}

// A signal's Python handler runs here, in Python's main thread, when that is the one that waits; when it raises, the wait ends.
// Other threads have nothing to look for, and must not ask for the GIL: whoever holds it may be waiting for them.
std::function<bool()> InterruptCheck() {
  const auto main =
      nb::cast<uintptr_t>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  return [main] {
    if (static_cast<uintptr_t>(pthread_self()) != main) return false;
    nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
  };
}

std::unique_ptr<Connection> Open(const std::string& endpoint, double timeout) {
  auto connection =
      ValueOrThrow(WithoutGil([&] { return Connection::Open(endpoint, absl::Seconds(timeout)); }));
  connection->SetInterruptCheck(InterruptCheck());
  return connection;
}

// A view of an arena as an object that torch.from_dlpack takes; it keeps the session, and so the mapping, alive.
nb::object View(nb::handle session, std::byte* data, size_t bytes) {
  const std::optional<int> device = nb::cast<Session&>(session).device();
  return nb::cast(nb::ndarray<uint8_t>(
      data, {bytes}, session, {}, nb::dtype<uint8_t>(),
      device.has_value() ? nb::device::cuda::value : nb::device::cpu::value, device.value_or(0)));
}

// A cudaStream_t as torch gives it, or none.
using StreamNumber = std::optional<uintptr_t>;

client::DeviceStream ToStream(uintptr_t number) {
  return {reinterpret_cast<void*>(number)};  // NOLINT(performance-no-int-to-ptr): what torch has
}

// Of the table or the groups: the library ends the process at an index that is not in it.
void CheckIndex(const char* what, int index, int count) {
  if (index >= 0 && index < count) return;
  const std::string range = count == 0 ? "the session is not configured yet"
                                       : "expected 0 to " + std::to_string(count - 1);
  throw nb::index_error(
      (std::string(what) + ": " + range + ", got " + std::to_string(index)).c_str());
}

nb::object Own(std::vector<std::byte> data) {
  auto owner = std::make_unique<std::vector<std::byte>>(std::move(data));
  std::byte* bytes = owner->data();
  const size_t size = owner->size();
  nb::capsule capsule(owner.release(),
                      [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  return nb::cast(nb::ndarray<uint8_t>(bytes, {size}, capsule));
}

void BindEnums(nb::module_& m) {
  nb::enum_<client::Route>(m, "Route")
      .value("MUON", client::Route::kMuon)
      .value("ADAMW", client::Route::kAdamw)
      .value("SHARDED_ADAMW", client::Route::kShardedAdamw);
  nb::enum_<client::Dtype>(m, "Dtype")
      .value("F32", client::Dtype::kF32)
      .value("BF16", client::Dtype::kBF16)
      .value("F16", client::Dtype::kF16);
  nb::enum_<client::AdjustLr>(m, "AdjustLr")
      .value("MATCH_RMS_ADAMW", client::AdjustLr::kMatchRmsAdamw)
      .value("ORIGINAL", client::AdjustLr::kOriginal)
      .value("SPECTRAL", client::AdjustLr::kSpectral)
      .value("NONE", client::AdjustLr::kNone);
  nb::enum_<client::Nonfinite>(m, "Nonfinite")
      .value("SKIP", client::Nonfinite::kSkip)
      .value("ERROR", client::Nonfinite::kError)
      .value("APPLY", client::Nonfinite::kApply);
  nb::enum_<client::NsForm>(m, "NsForm")
      .value("GRAM", client::NsForm::kGram)
      .value("DIRECT", client::NsForm::kDirect);
  nb::enum_<client::StateKind>(m, "StateKind")
      .value("WEIGHT", client::StateKind::kWeight)
      .value("MOMENTUM", client::StateKind::kMomentum)
      .value("EXP_AVG", client::StateKind::kExpAvg)
      .value("EXP_AVG_SQ", client::StateKind::kExpAvgSq)
      .value("STEP", client::StateKind::kStep);
}

void BindTable(nb::module_& m) {
  nb::class_<client::Mesh>(m, "Mesh").def(
      "__init__",
      [](client::Mesh* self, int replicate, int shard, int tp) {
        new (self) client::Mesh{replicate, shard, tp};
      },
      "replicate"_a = 1, "shard"_a = 1, "tp"_a = 1);
  nb::class_<client::Boundary>(m, "Boundary")
      .def(
          "__init__",
          [](client::Boundary* self, std::string name, bool exclusive_window) {
            new (self) client::Boundary{std::move(name), exclusive_window};
          },
          "name"_a, "exclusive_window"_a = false);
  nb::class_<client::Block>(m, "Block")
      .def(
          "__init__",
          [](client::Block* self, int64_t row_begin, int64_t row_end) {
            new (self) client::Block{row_begin, row_end};
          },
          "row_begin"_a, "row_end"_a);
  nb::class_<client::Parameter>(m, "Parameter")
      .def(
          "__init__",
          [](client::Parameter* self, std::string name, std::vector<int64_t> shape,
             client::Route route, int boundary, std::vector<client::Block> blocks) {
            new (self) client::Parameter{std::move(name), std::move(shape), route, boundary,
                                         std::move(blocks)};
          },
          "name"_a, "shape"_a, "route"_a, "boundary"_a, "blocks"_a = std::vector<client::Block>());
  nb::class_<client::OpenOptions>(m, "OpenOptions")
      .def(
          "__init__",
          [](client::OpenOptions* self, std::string job, int rank, client::Mesh mesh,
             bool reshard_after_forward, std::vector<client::Boundary> boundaries,
             std::vector<client::Parameter> parameters, double formation_timeout,
             uint32_t restart_count, std::string coordinator) {
            new (self) client::OpenOptions{.job = std::move(job),
                                           .rank = rank,
                                           .mesh = mesh,
                                           .reshard_after_forward = reshard_after_forward,
                                           .boundaries = std::move(boundaries),
                                           .parameters = std::move(parameters),
                                           .formation_timeout = absl::Seconds(formation_timeout),
                                           .restart_count = restart_count,
                                           .coordinator = std::move(coordinator)};
          },
          "job"_a, "rank"_a, "mesh"_a, "reshard_after_forward"_a, "boundaries"_a, "parameters"_a,
          "formation_timeout"_a = 0.0, "restart_count"_a = 0, "coordinator"_a = "");
  nb::class_<client::PlacementEntry>(m, "PlacementEntry")
      .def_ro("owner", &client::PlacementEntry::owner)
      .def_ro("cost", &client::PlacementEntry::cost);
  nb::class_<client::Placement>(m, "Placement")
      .def_ro("parameters", &client::Placement::parameters)
      .def_ro("loads", &client::Placement::loads)
      .def_ro("imbalance", &client::Placement::imbalance)
      .def_ro("lower_bound", &client::Placement::lower_bound);
}

void BindOptimizer(nb::module_& m) {
  nb::class_<client::Group>(m, "Group")
      .def(
          "__init__",
          [](client::Group* self, std::string name, client::Route route) {
            new (self) client::Group{std::move(name), route};
          },
          "name"_a, "route"_a);
  nb::class_<client::ParameterConfig>(m, "ParameterConfig")
      .def(
          "__init__",
          [](client::ParameterConfig* self, client::Dtype param_dtype, client::Dtype grad_dtype,
             int group) {
            new (self) client::ParameterConfig{param_dtype, grad_dtype, group};
          },
          "param_dtype"_a, "grad_dtype"_a, "group"_a);
  nb::class_<client::NewtonSchulzOptions>(m, "NewtonSchulzOptions")
      .def(
          "__init__",
          [](client::NewtonSchulzOptions* self, client::NsForm form, int steps,
             std::vector<std::array<double, 3>> coefficients,
             std::optional<std::vector<int>> restarts, std::optional<client::Dtype> iteration_dtype,
             bool deterministic, bool tf32) {
            new (self) client::NewtonSchulzOptions{
                form,          steps, std::move(coefficients), std::move(restarts), iteration_dtype,
                deterministic, tf32};
          },
          "form"_a, "steps"_a, "coefficients"_a = std::vector<std::array<double, 3>>(),
          "restarts"_a = nb::none(), "iteration_dtype"_a = nb::none(), "deterministic"_a = false,
          "tf32"_a = false);
  nb::class_<client::OptimizerOptions>(m, "OptimizerOptions")
      .def(
          "__init__",
          [](client::OptimizerOptions* self, std::vector<client::Group> groups,
             std::vector<client::ParameterConfig> parameters,
             client::NewtonSchulzOptions newton_schulz, bool nesterov, client::AdjustLr adjust_lr,
             client::Nonfinite nonfinite) {
            new (self) client::OptimizerOptions{std::move(groups),
                                                std::move(parameters),
                                                std::move(newton_schulz),
                                                nesterov,
                                                adjust_lr,
                                                nonfinite};
          },
          "groups"_a, "parameters"_a, "newton_schulz"_a, "nesterov"_a, "adjust_lr"_a,
          "nonfinite"_a);
  nb::class_<client::StepResult>(m, "StepResult")
      .def_ro("step", &client::StepResult::step)
      .def_ro("applied", &client::StepResult::applied)
      .def_ro("total_norm", &client::StepResult::total_norm)
      .def_ro("clip_coefficient", &client::StepResult::clip_coefficient);
  nb::class_<client::StepProfile>(m, "StepProfile")
      .def_ro("step", &client::StepProfile::step)
      .def_ro("wait", &client::StepProfile::wait)
      .def_ro("reduce", &client::StepProfile::reduce)
      .def_ro("verdict", &client::StepProfile::verdict)
      .def_ro("update", &client::StepProfile::update)
      .def_ro("publish", &client::StepProfile::publish)
      .def_ro("total", &client::StepProfile::total)
      .def_ro("newton_schulz_calls", &client::StepProfile::newton_schulz_calls)
      .def_ro("forms", &client::StepProfile::forms)
      .def_ro("kernel", &client::StepProfile::kernel);
}

void BindSession(nb::module_& m) {
  nb::class_<Session>(m, "Session")
      .def_prop_ro("placement", &Session::placement)
      .def_prop_ro("step_id", &Session::step)
      .def_prop_ro("generation", &Session::generation)
      .def_prop_ro("arenas_on_device", &Session::arenas_on_device)
      .def_prop_ro("device", &Session::device)
      .def(
          "configure",
          [](Session& s, const client::OptimizerOptions& options) {
            Call([&] { return s.Configure(options); });
          },
          "options"_a)
      .def("start", [](Session& s) { Call([&] { return s.Start(); }); })
      .def(
          "grad",
          [](nb::handle_t<Session> s, int parameter, size_t bytes) {
            const auto& session = nb::cast<Session&>(s);
            CheckIndex("parameter", parameter, session.parameters());
            return View(s, session.grad(parameter), bytes);
          },
          "parameter"_a, "bytes"_a)
      .def(
          "weight",
          [](nb::handle_t<Session> s, int parameter, size_t bytes) {
            const auto& session = nb::cast<Session&>(s);
            CheckIndex("parameter", parameter, session.parameters());
            return View(s, session.weight(parameter), bytes);
          },
          "parameter"_a, "bytes"_a)
      .def(
          "window",
          [](const Session& s, int boundary) {
            CheckIndex("boundary", boundary, s.boundaries());
            return s.window(boundary);
          },
          "boundary"_a)
      .def(
          "wait_weights",
          [](Session& s, int boundary) { Call([&] { return s.WaitWeights(boundary); }); },
          "boundary"_a)
      .def("wait_all_weights", [](Session& s) { Call([&] { return s.WaitAllWeights(); }); })
      .def(
          "materialize",
          [](Session& s, int boundary) { Call([&] { return s.Materialize(boundary); }); },
          "boundary"_a)
      .def(
          "release",
          [](Session& s, int boundary, StreamNumber stream) {
            Call([&] {
              return stream.has_value() ? s.Release(boundary, ToStream(*stream))
                                        : s.Release(boundary);
            });
          },
          "boundary"_a, "stream"_a = nb::none())
      .def(
          "wait_grad_writable",
          [](Session& s, int boundary) { Call([&] { return s.WaitGradWritable(boundary); }); },
          "boundary"_a)
      .def(
          "ready",
          [](Session& s, int boundary, const std::vector<int>& present, StreamNumber stream) {
            for (int parameter : present) CheckIndex("present", parameter, s.parameters());
            Call([&] {
              for (int parameter : present) s.SetPresent(parameter);
              return stream.has_value() ? s.Ready(boundary, ToStream(*stream)) : s.Ready(boundary);
            });
          },
          "boundary"_a, "present"_a, "stream"_a = nb::none(),
          "Marks the parameters that have a gradient, then READY once `stream` has come here.")
      .def("end_backward", &Session::EndBackward)
      .def("discard", [](Session& s) { Call([&] { return s.Discard(); }); })
      .def(
          "set_hyper",
          [](Session& s, int group, double lr, double weight_decay, double momentum, double beta1,
             double beta2, double eps) {
            CheckIndex("group", group, s.groups());
            s.SetHyper(group, client::Hyper{lr, weight_decay, momentum, beta1, beta2, eps});
          },
          "group"_a, "lr"_a, "weight_decay"_a, "momentum"_a = 0.0, "beta1"_a = 0.0, "beta2"_a = 0.0,
          "eps"_a = 0.0)
      .def(
          "step",
          [](Session& s, bool found_inf, double max_norm) {
            return ValueOrThrow(WithoutGil([&] { return s.Step({found_inf, max_norm}); }));
          },
          "found_inf"_a = false, "max_norm"_a = 0.0)
      .def(
          "read_state",
          [](Session& s, const std::string& parameter, client::StateKind kind) {
            return Own(ValueOrThrow(WithoutGil([&] { return s.ReadState(parameter, kind); })));
          },
          "parameter"_a, "kind"_a)
      .def(
          "write_state",
          [](Session& s, const std::string& parameter, client::StateKind kind, Bytes data) {
            const auto* begin = reinterpret_cast<const std::byte*>(data.data());
            Call([&] { return s.WriteState(parameter, kind, {begin, data.size()}); });
          },
          "parameter"_a, "kind"_a, "data"_a)
      .def("last_profile",
           [](Session& s) { return ValueOrThrow(WithoutGil([&] { return s.LastProfile(); })); })
      .def("close", [](Session& s) { Call([&] { return s.Close(); }); });
}

}  // namespace

void BindClient(nb::module_& m) {
  BindEnums(m);
  BindTable(m);
  BindOptimizer(m);
  BindSession(m);
  nb::class_<Connection>(m, "Connection")
      .def_static("open", &Open, "endpoint"_a, "timeout"_a = 5.0)
      .def_prop_ro("endpoint", &Connection::endpoint)
      .def_prop_ro("daemon_version", &Connection::daemon_version)
      .def_prop_ro("grpc_calls", &Connection::grpc_calls)
      .def(
          "open_session",
          [](Connection& c, const client::OpenOptions& options) {
            return ValueOrThrow(WithoutGil([&] { return c.OpenSession(options); }));
          },
          "options"_a, nb::keep_alive<0, 1>());
  m.def("default_endpoint", &client::DefaultEndpoint);
}

}  // namespace dmuon::python
