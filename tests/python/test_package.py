"""What the package is before it does anything."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import dmuon
import pytest

NAMES = [
    "dedicate_params", "dedicate_params_ddp", "dedicate_params_ddp_tp", "replicate", "replicate_tp", "install_patch",
    "DMuonParamPolicy", "Muon", "NewtonSchulz", "newton_schulz", "gram_newton_schulz", "direct_newton_schulz",
    "get_ns_backend", "get_backend_status", "POLAR_EXPRESS_COEFFICIENTS", "YOU_COEFFICIENTS", "no_sync",
    "prepare_muon_grads", "wait_all_reduces", "broadcast_all_updates", "broadcast_all_updates_async",
    "wait_all_replicate_broadcasts", "wait_all_post_step_broadcasts", "get_dedicated_params", "get_owned_params",
    "get_comm_ctx", "DedicatedCommContext", "collect_forward_unshard_profile", "clip_grad_norm_",
    "register_muon_grad_clip_strategy", "MuonGradClipStats", "clip_grad_norm_buckets_", "SegmentedGradClipResult",
    "try_clip_optimizer_grad_norm_buckets_", "GradClipBucket", "GradClipBucketStats", "get_model_state_dict",
    "set_model_state_dict", "get_optimizer_state_dict", "set_optimizer_state_dict", "summarize_param_groups",
    "summarize_comm_plan",
]  # fmt: skip
NOT_BUILT = [
    "dedicate_params_ddp", "dedicate_params_ddp_tp", "replicate", "replicate_tp", "prepare_muon_grads",
    "wait_all_reduces", "collect_forward_unshard_profile", "clip_grad_norm_", "register_muon_grad_clip_strategy",
    "clip_grad_norm_buckets_", "try_clip_optimizer_grad_norm_buckets_", "get_optimizer_state_dict",
    "set_optimizer_state_dict", "summarize_param_groups", "summarize_comm_plan",
]  # fmt: skip


def test_every_name_exists():
    assert [name for name in NAMES if not hasattr(dmuon, name)] == []
    assert set(NAMES) <= set(dmuon.__all__)


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_not_built_says_so(name):
    with pytest.raises(NotImplementedError, match=re.escape(f"dmuon.{name} ")):
        getattr(dmuon, name)(None)


def test_argument_names_order_and_defaults():
    muon = list(inspect.signature(dmuon.Muon).parameters.items())
    assert [name for name, _ in muon[:12]] == [
        "model", "lr", "momentum", "weight_decay", "ns_steps", "adamw_lr", "adamw_betas", "adamw_weight_decay",
        "adamw_eps", "param_groups", "ns_backend", "nesterov",
    ]  # fmt: skip
    assert [p.default for _, p in muon[1:13]] == [
        0.02, 0.95, 0.0, 5, 1e-3, (0.9, 0.999), 0.01, 1e-8, None, "gram", True, True,
    ]  # fmt: skip
    dedicate = inspect.signature(dmuon.dedicate_params).parameters
    assert list(dedicate)[:8] == [
        "model", "mesh", "predicate", "compute_dtype", "reshard_after_forward", "replicate_mesh",
        "hook_boundary_predicate", "hook_boundary_strict",
    ]  # fmt: skip
    assert dedicate["reshard_after_forward"].default is True


def run(code, **environment):
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_importing_starts_no_thread_and_opens_no_socket():
    result = run(
        "import os, threading, torch, torch.distributed.fsdp\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "fds = lambda: [f'/proc/self/fd/{f}' for f in os.listdir('/proc/self/fd')]\n"
        "sockets = lambda: sum(os.readlink(f).startswith('socket') for f in fds() if os.path.islink(f))\n"
        "before = count(), sockets()\n"
        "import dmuon\n"
        "assert (count(), sockets()) == before, (before, count(), sockets())\n"
        "from dmuon import _native\n"
        "assert (count(), sockets()) == before, (before, count(), sockets())\n"
    )
    assert result.returncode == 0, result.stderr


OURS = """
import dmuon
from dmuon import _native
def ours():
    c = _native.Connection.open(ENDPOINT)
    s = c.open_session(_native.OpenOptions(
        job="beside-" + ORDER, rank=0, mesh=_native.Mesh(), reshard_after_forward=False,
        boundaries=[_native.Boundary("")], parameters=[_native.Parameter("w", [4, 4], _native.Route.MUON, 0)]))
    assert s.placement.parameters[0].owner == 0 and c.grpc_calls == 1
    s.close()
"""
THEIRS = """
import grpc
from google.protobuf import struct_pb2
def theirs():
    from concurrent.futures import ThreadPoolExecutor
    class Echo(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: request,
                request_deserializer=struct_pb2.Value.FromString,
                response_serializer=struct_pb2.Value.SerializeToString)
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/echo/Echo", struct_pb2.Value.SerializeToString, struct_pb2.Value.FromString)
        assert call(struct_pb2.Value(string_value="hello"), timeout=20).string_value == "hello"
    server.stop(None)
"""


def native_session(connection, job):
    from dmuon import _native

    return connection.open_session(
        _native.OpenOptions(
            job=job, rank=0, mesh=_native.Mesh(), reshard_after_forward=False,
            boundaries=[_native.Boundary("")],
            parameters=[_native.Parameter("w", [4, 4], _native.Route.MUON, 0)],
        )
    )  # fmt: skip


INDEXED = {
    "grad": (lambda s, i: s.grad(i, 64), "parameter"),
    "weight": (lambda s, i: s.weight(i, 64), "parameter"),
    "window": (lambda s, i: s.window(i), "boundary"),
    "ready": (lambda s, i: s.ready(0, [i]), "present"),
    "set_hyper": (lambda s, i: s.set_hyper(i, 0.1, 0.0), "group"),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_out_of_range_is_an_index_error_and_the_session_goes_on(daemon, name):
    from dmuon import _native

    call, what = INDEXED[name]
    session = native_session(_native.Connection.open(daemon.endpoint), "indexed-" + name)
    with pytest.raises(IndexError, match=f"{what}: the session is not configured yet, got 0"):
        call(session, 0)
    session.configure(
        _native.OptimizerOptions(
            groups=[_native.Group("g", _native.Route.MUON)],
            parameters=[_native.ParameterConfig(_native.Dtype.F32, _native.Dtype.F32, 0)],
            newton_schulz=_native.NewtonSchulzOptions(
                form=_native.NsForm.DIRECT, steps=5, coefficients=[], restarts=None, deterministic=False
            ),
            nesterov=True, adjust_lr=_native.AdjustLr.NONE, nonfinite=_native.Nonfinite.SKIP,
        )
    )  # fmt: skip
    session.start()
    for index in (1, 99, -1):
        with pytest.raises(IndexError, match=f"{what}: expected 0 to 0, got {index}"):
            call(session, index)
    call(session, 0)
    session.close()


@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_it_lives_beside_grpcio_and_protobuf(daemon, order):
    head = f"ENDPOINT, ORDER = {daemon.endpoint!r}, {order!r}\n"
    parts = [OURS, THEIRS] if order == "ours first" else [THEIRS, OURS]
    result = run(head + "".join(parts) + "ours(); theirs(); ours(); theirs()\n")
    assert result.returncode == 0, result.stderr


def test_the_module_exports_its_init_function_only():
    from dmuon import _native

    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", _native.__file__], capture_output=True, text=True, check=True
    ).stdout.split()
    assert [s for s in symbols if not re.fullmatch("[0-9a-f]{16}|[A-Z]", s)] == ["PyInit__native"]


def test_the_patch_is_idempotent():
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    patched = _fsdp_init._get_managed_states
    dmuon.install_patch()
    assert _fsdp_init._get_managed_states is patched
    assert hasattr(patched, "__dmuon_original__")


def test_a_missing_private_name_is_a_clear_error_at_dedicate_params(monkeypatch):
    from dmuon import _torch_private
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    monkeypatch.delattr(_fsdp_init, "_get_managed_states")
    dmuon.install_patch()  # nothing happens at import
    with pytest.raises(_torch_private.MissingInTorch, match=r"_get_managed_states.*fully_shard.*tested with torch"):
        from dmuon import fsdp_patch

        fsdp_patch.check_patch()


def test_it_is_typed():
    folder = Path(dmuon.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_native.pyi").exists()


def test_the_stub_names_what_the_module_has():
    from dmuon import _native

    stub = (Path(dmuon.__file__).parent / "_native.pyi").read_text()
    classes = dict(re.findall(r"^class (\w+)(?:\(.*\))?:\n((?:(?:    .*)?\n)+)", stub, re.M))
    public = {name for name in dir(_native) if not name.startswith("_")}
    assert public == set(classes) | set(re.findall(r"^def (\w+)", stub, re.M))
    for name, body in classes.items():
        described = set(re.findall(r"^    def (\w+)|^    (\w+) = ", body, re.M))
        described = {a or b for a, b in described} - {"__init__"}
        actual = {m for m in vars(getattr(_native, name)) if not m.startswith("_")}
        assert actual - {"name", "value"} == described, name
