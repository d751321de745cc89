#include "python_client/src/native/status.h"

#include <nanobind/nanobind.h>

#include <string>

namespace nb = nanobind;

namespace dmuon::python {

void ThrowIfError(const absl::Status& status) {
  // Set by the interrupt check of client.cc, in this thread.
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  if (status.ok()) return;
  const std::string message(status.message());
  nb::object error = nb::module_::import_("dmuon.errors")
                         .attr("from_status")(static_cast<int>(status.code()), message.c_str());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

}  // namespace dmuon::python
