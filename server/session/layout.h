// Where parameters lie in the arenas: a pure function of the table, the dtypes and the mode.
#ifndef DMUON_SERVER_SESSION_LAYOUT_H_
#define DMUON_SERVER_SESSION_LAYOUT_H_

#include "server/parameter/parameter.h"
#include "server/session/types.h"

namespace dmuon::server {

// Z2: every boundary has its own place. Z3: boundaries take turns in two windows; an exclusive one (the root, and those
// that contain others) has its own. A boundary is contiguous; every parameter is 256-byte aligned.
Layout MakeLayout(const ParameterTable& table, const OptimizerSpec& spec, bool z3);

}  // namespace dmuon::server

#endif  // DMUON_SERVER_SESSION_LAYOUT_H_
