"""What there is on GPUs alone: devices, streams and the life of device memory. On the stand-ins, with two devices."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from support.models import DEVICE, batches, close, dedicate, make, projections, shard, weights
from support.ranks import Ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("DMUON_TEST_BACKEND") != "cuda",
    reason="needs the stand-ins for CUDA: DMUON_BUILD=build/cuda DMUON_TEST_BACKEND=cuda",
)


def dedicate_all(model, z3, **muon):
    """All parameters in the daemon, so that nothing of FSDP2 waits for a stream in between."""
    import dmuon
    from torch.distributed.device_mesh import init_device_mesh

    dmuon.dedicate_params(
        model, init_device_mesh(DEVICE, (1,)), lambda n, p: True, reshard_after_forward=z3,
        route_hint_fn=lambda n, p: "muon" if projections(n, p) else "adamw",
    )  # fmt: skip
    return dmuon.Muon(model, **muon)


KEEP = {"lr": 0.0, "momentum": 0.0, "nesterov": False, "adamw_lr": 0.0, "adamw_weight_decay": 0.0}


# ---- devices


def on_another_device(rank, world_size, z3):
    """The model is on cuda:1, and nobody made that the current device."""
    import ctypes

    result = []
    for device in ("cuda:0", "cuda:1"):
        model = make().to(device)
        optimizer = dedicate_all(model, z3)
        assert torch.cuda.current_device() == 0
        for ids in batches(2):
            optimizer.zero_grad()
            model(ids.to(device)).backward()
            optimizer.step()
        for p in model.parameters():
            p.grad = torch.ones(p.shape, device=device)  # sent by the thread that steps
        optimizer.step()
        assert {p.device for p in model.parameters()} == {torch.device(device)}
        result.append(weights(model))
        close(model)
    assert all(np.array_equal(result[0][name], result[1][name]) for name in result[0])
    return ctypes.CDLL(None).fake_cuda_has_context(1)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_the_arenas_are_on_the_parameters_device_whichever_is_current(ranks, z3):
    assert ranks(1, on_another_device, z3) == [1]


NO_CONTEXT = """
import ctypes, gc, sys, torch, torch.distributed as dist
from support.models import Toy, close
from test_cuda import dedicate_all
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = Toy().to("cuda:1")
optimizer = dedicate_all(model, sys.argv[2] == "z3")
for ids in torch.randint(0, 23, (2, 8, 9)):
    model(ids.to("cuda:1")).backward()
    optimizer.step()
for p in model.parameters():
    p.grad = torch.ones(p.shape).to("cuda:1")
optimizer.step()
close(model)
del model, optimizer, p
gc.collect()
print(ctypes.CDLL(None).fake_cuda_has_context(0), ctypes.CDLL(None).fake_cuda_has_context(1))
"""


@pytest.mark.parametrize("mode", ["z2", "z3"])
def test_no_context_is_made_on_the_device_that_was_only_current(daemon, tmp_path, mode):
    environment = {**os.environ, "DMUON_ENDPOINT": daemon.endpoint}
    process = subprocess.run(
        [sys.executable, "-c", NO_CONTEXT, str(tmp_path / "store"), mode], env=environment, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert process.stdout == "0 1\n", process.stderr


def one_step(rank, world_size):
    model = make()
    optimizer = dedicate(model, world_size, True)
    model(shard(batches(1)[0], rank, world_size)).backward()
    optimizer.step()
    result = weights(model)
    close(model)
    return result


def test_devices_are_known_by_their_ids_whatever_the_trainer_calls_them(ranks, daemon, monkeypatch):
    expected = ranks(2, one_step)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    pool = Ranks(2, daemon.endpoint)
    try:
        for found in pool.run(one_step, timeout=90):
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
    finally:
        pool.close()


def misplaced(rank, world_size):
    model = make().cpu()
    with pytest.raises(ValueError, match=r"'embedding.weight' is on cpu, and the daemon computes on GPUs: move the"):
        dedicate_all(model, False)
    close(model)
    model = make()
    model.layers[1].to("cuda:1")
    with pytest.raises(ValueError, match=r"'layers\.1\.norm\.weight' are on cuda:0 and cuda:1: expected one device"):
        dedicate_all(model, False)
    close(model)


def test_a_model_on_the_cpu_or_on_two_devices_is_named(ranks):
    ranks(1, misplaced)


def with_a_daemon_on_the_cpu(rank, world_size):
    model = make()
    with pytest.raises(ValueError, match=r"is on cuda:0, and the daemon computes on the CPU.*with backend 'cuda'"):
        dedicate_all(model, False)
    close(model)


def test_a_model_on_a_gpu_is_refused_by_a_daemon_on_the_cpu(daemon_on_the_cpu):
    pool = Ranks(1, daemon_on_the_cpu.endpoint)
    try:
        pool.run(with_a_daemon_on_the_cpu, timeout=90)
    finally:
        pool.close()


# ---- streams


class Products(torch.autograd.Function):
    """The sum of x @ w, of which one node has the gradients of all w."""

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x)
        ctx.count = len(weights)
        return sum((x @ w).sum() * (i + 1) for i, w in enumerate(weights))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ones = torch.ones(x.shape[0], 16, device=x.device)
        return None, *(x.T @ ones * (i + 1) * gradient for i in range(ctx.count))


class Branches(nn.Module):
    """One boundary whose gradients arrive on four streams: those on which its weights were first used."""

    def __init__(self):
        super().__init__()
        self.projs = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(4))

    def forward(self, x):
        seen = []
        for weight in self.projs:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                seen.append(weight.view(16, 16))
        return Products.apply(x, *seen)


def branches(rank, world_size, z3):
    from test_hooks import daemon_gradients

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected = {f"projs.{i}": x.cpu().T @ torch.ones(4, 16) * (i + 1) for i in range(4)}
    model = make(Branches)
    optimizer = dedicate_all(model, z3, **KEEP)
    handed_over = look_at_what_is_handed_over(model)
    for _ in range(5):
        model(x).backward()
        optimizer.step()
        assert not optimizer.last_step_skipped
        for found in (handed_over.pop(), daemon_gradients(model)):
            for name, gradient in expected.items():
                assert torch.equal(found[name], gradient), name
    close(model)


def look_at_what_is_handed_over(model):
    """What is in GRAD once the stream of each `ready` has come to it, by name; memory of the stand-in can be read."""
    import ctypes

    import dmuon

    ctx = dmuon.get_comm_ctx(model)
    collector = ctx.gradients
    session, found = collector._session, []

    class Looks:
        def __getattr__(self, name):
            return getattr(session, name)

        def ready(self, index, present, stream):
            torch.cuda.ExternalStream(stream).synchronize()
            found.append({})
            for p in ctx.boundaries[index].params:
                data = ctypes.string_at(p.grad.data_ptr(), p.grad.numel() * 4)
                found[-1][p.param_name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(p.shape)
            session.ready(index, present, stream)

    collector._session = Looks()
    return found


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_gradients_on_several_streams_are_all_there(ranks, z3):
    ranks(1, branches, z3)


def by_hand_on_another_stream(rank, world_size):
    """Memory of a gradient is used again, on its own stream, while the copy into the arena has not run."""
    import dmuon

    from test_hooks import daemon_gradients

    model = make(Branches)
    optimizer = dedicate_all(model, False, **KEEP)
    ctx = dmuon.get_comm_ctx(model)
    stream = torch.cuda.Stream()
    for _ in range(5):
        for p in ctx.params:
            with torch.cuda.stream(stream):
                p.tensor.grad = torch.ones(16, 16).to(DEVICE)
            torch.cuda.current_stream().wait_stream(stream)
            ctx.gradients.take(p)
            with torch.cuda.stream(stream):
                torch.zeros(16, 16).to(DEVICE)
        optimizer.step()
        assert all((value == 1).all() for value in daemon_gradients(model).values())
    close(model)


def test_a_gradients_memory_is_kept_until_it_was_copied(ranks):
    ranks(1, by_hand_on_another_stream)


class Keeps(nn.Module):
    """Keeps what its weights were when its stream came to them."""

    def __init__(self):
        super().__init__()
        self.a_proj = nn.Linear(16, 16, bias=False)
        self.kept = []

    def forward(self, x):
        y = self.a_proj(x).square().mean() if torch.is_grad_enabled() else x
        self.kept.append(self.a_proj.weight.detach().clone())
        return y


class Beside(nn.Module):
    """Layers beside each other, each on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Keeps() for _ in range(6))
        self.streams = [torch.cuda.Stream() for _ in self.layers]

    def forward(self, x):
        outputs = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(layer(x))
        return outputs

    def kept(self):
        """By layer."""
        for layer, stream in zip(self.layers, self.streams, strict=True):
            with torch.cuda.stream(stream):
                yield [kept.cpu() for kept in layer.kept]


def late_readers(rank, world_size, z3):
    """Copies of weights that nobody waits for before the step, or before the window is needed again."""
    import dmuon

    x = torch.randn(4, 16).to(DEVICE)
    model = make(Beside)
    before = [layer.a_proj.weight.detach().cpu() for layer in model.layers]
    optimizer = dedicate_all(model, z3)
    torch.cuda.synchronize()
    torch.autograd.backward(model(x))
    with torch.no_grad():
        model(x)
    optimizer.step()
    dmuon.wait_all_post_step_broadcasts(model)
    for kept, weight in zip(model.kept(), before, strict=True):
        assert len(kept) == 2 and all(torch.equal(value, weight) for value in kept)
    close(model)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_weights_are_not_written_over_while_something_may_read_them(ranks, z3):
    ranks(1, late_readers, z3)


def releases(rank, world_size):
    """For each release in forward and backward: is it behind all that the device has got?"""
    import dmuon

    model = make(depth=6)
    optimizer = dedicate_all(model, True)
    windows = dmuon.get_comm_ctx(model).weights
    session, found = windows._session, []

    class Looks:
        def __getattr__(self, name):
            return getattr(session, name)

        def release(self, index, stream):
            found.append(stream == torch.cuda.current_stream().cuda_stream)
            session.release(index, stream)

    windows._session = Looks()
    passes = []
    for ids in batches(2):
        optimizer.zero_grad()
        model(ids).backward()
        passes += found
        optimizer.step()
        found.clear()
    close(model)
    return passes


def test_a_window_is_not_held_by_what_came_after_its_boundary(ranks):
    (found,) = ranks(1, releases)
    assert len(found) >= 16 and not any(found)


def capture(rank, world_size, z3):
    model = make()
    optimizer = dedicate_all(model, z3)
    ids = batches(1)[0]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured around dedicated parameters"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                model(ids)
            finally:
                graph.capture_end()
    model(ids).backward()
    optimizer.step()
    close(model)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_a_cuda_graph_around_the_hooks_is_refused(ranks, z3):
    ranks(1, capture, z3)


# ---- memory


def after_close(rank, world_size):
    """The model keeps its weights, and their memory, for as long as it lives."""
    import ctypes
    import gc

    library = ctypes.CDLL(None)

    def freed():
        return library.fake_cuda_calls(b"cudaFree")

    model = make()
    optimizer = dedicate_all(model, False)
    model(batches(1)[0]).backward()
    optimizer.step()
    expected = weights(model)
    gc.collect()  # models of other tests
    before = freed()
    close(model)
    gc.collect()
    assert freed() == before
    for name, p in model.named_parameters():
        assert np.array_equal(p.detach().cpu().numpy(), expected[name]), name
    del model, optimizer, p
    gc.collect()
    return freed() - before


def test_a_model_keeps_its_weights_after_its_session(ranks):
    assert ranks(1, after_close) == [2]  # GRAD and WEIGHT


def state_dicts(rank, world_size, z3):
    import dmuon

    model = make(seed=rank)
    dedicate(model, world_size, z3)
    saved = dmuon.get_model_state_dict(model, rank0_only=False)
    assert {value.device.type for value in saved.values()} == {"cpu"}
    there = dmuon.get_model_state_dict(model, cpu_offload=False, rank0_only=False)
    assert {value.device for value in there.values()} == {torch.device("cuda", torch.cuda.current_device())}
    # From rank 0 alone, wherever its tensors are: the process group moves none that is on the CPU.
    for state in (saved, there):
        changed = {name: value + 1 for name, value in state.items()}
        dmuon.set_model_state_dict(model, changed if rank == 0 else {})
        found = weights(model)
        for name, value in saved.items():
            assert np.array_equal(found[name], value.numpy() + 1), name
    close(model)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_state_dicts_are_where_they_are_asked_for(ranks, z3):
    ranks(2, state_dicts, z3)
