// dmuon._native: a thin binding, one Python name for each name of client/dmuon/client.h.
#include "python_client/src/native/module.h"

#include <nanobind/nanobind.h>

NB_MODULE(_native, m) {
  // Parameters point into the arenas until the interpreter is gone, so a session that outlives it is no mistake.
  nanobind::set_leak_warnings(false);
  m.doc() = "The C++ client of dmuond and its Newton-Schulz kernels.";
  dmuon::python::BindClient(m);
  dmuon::python::BindNewtonSchulz(m);
}
