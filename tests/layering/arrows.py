"""Who may include whom. docs/architecture.md draws the same table; the longest matching path wins.

An entry lists the arrows that go out of a node. Whatever can be reached along arrows may be included: a layer may
look down past its neighbour, never up.
"""

DOMAIN = ["server/session/types", "server/parameter", "server/placement"]

ARROWS: dict[str, list[str]] = {
    "base": [],
    "proto/wire": ["base"],
    "kernels": ["base"],
    # Host-only tables, which every layer of the server may read.
    "server/parameter": ["kernels", "base"],
    "server/placement": ["server/parameter"],
    "server/session/types": ["server/placement", "proto/wire"],
    # The step, from the memory it runs on up to the table of sessions.
    "server/memory": [*DOMAIN],
    "server/collective": [*DOMAIN],
    "server/clip": [*DOMAIN, "server/collective"],
    "server/route": [*DOMAIN, "server/collective", "server/memory"],
    "server/telemetry": [*DOMAIN],
    "server/step": [*DOMAIN, "server/route", "server/clip", "server/collective", "server/memory", "server/telemetry"],
    "server/session": ["server/step"],
    # The edge: sockets and messages.
    "server/attach": ["server/session"],
    "server/rpc": ["server/session", "proto/dmuon"],
    "server/daemon": ["server/rpc", "server/attach"],
    "server/main": ["server/daemon"],
    # The other side of the control page.
    "client/dmuon": [],
    "client": ["client/dmuon", "proto/wire", "proto/dmuon", "base"],
    "client/examples": ["client/dmuon"],
    "python_client": ["client/dmuon", "kernels"],
}

# Headers from outside and where they may stand; a file's path starts with one of these.
CONFINED: dict[str, list[str]] = {
    r"grpc(pp)?/|google/protobuf/|.*\.pb\.h$": ["server/rpc", "server/daemon", "client"],
    r"nccl\.h$": ["server/collective/nccl_"],
    r"cublas": ["kernels/cuda"],
    r"cuda": ["kernels/cuda", "server/collective/nccl_", "server/memory/cuda_", "client/cuda_"],
    r"yaml-cpp/": ["server/daemon", "client/ctl"],
    r"CLI/": ["server/main", "server/daemon", "client/ctl"],
    r"nlohmann/": ["server/daemon", "client/ctl"],
    r"nanobind/": ["python_client"],
    r"g(test|mock)/": [],
}

# Tests may include everything.
EXEMPT = ["tests"]
