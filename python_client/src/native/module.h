// The parts of the module.
#ifndef DMUON_PYTHON_CLIENT_NATIVE_MODULE_H_
#define DMUON_PYTHON_CLIENT_NATIVE_MODULE_H_

#include <nanobind/nanobind.h>

namespace dmuon::python {

void BindClient(nanobind::module_& m);
void BindNewtonSchulz(nanobind::module_& m);

}  // namespace dmuon::python

#endif  // DMUON_PYTHON_CLIENT_NATIVE_MODULE_H_
