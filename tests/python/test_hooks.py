"""The gradients that reach the daemon are bit for bit those of plain PyTorch, however the model is written.

With lr 0 and momentum 0 the daemon's momentum buffer after a step is the gradient that it reduced. In Z3, released
windows are filled with NaN, so that a weight that is read when it is not there shows.
"""

import dataclasses
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.models import batches, close, dedicate, make, projections, shard

WIDTH, VOCABULARY = 16, 23


class Block(nn.Module):
    def __init__(self, hidden=40):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, hidden)
        self.down_proj = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x))))


class Model(nn.Module):
    """The untied case, and the skeleton of the others."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed_proj = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(depth))
        self.head_proj = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def block(self):
        return Block()

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        logits = self.head_proj(self.run(self.embed_proj(ids[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head_proj.weight = self.embed_proj.weight


class ReentrantCheckpoint(Model):
    def run(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Checkpoint(Model):
    def run(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class CheckpointInside(Model):
    class block(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)


class ReentrantCheckpointInside(Model):
    class block(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)


def _run(layers, x):
    for layer in layers:
        x = layer(x)
    return x


class CheckpointedRegion(Model):
    """One region over boundaries that share a window: its recomputation displaces the boundary that runs."""

    def run(self, x):
        return checkpoint(_run, self.layers, x, use_reentrant=False)


class ReentrantCheckpointedRegion(Model):
    def run(self, x):
        return checkpoint(_run, self.layers, x, use_reentrant=True)


class Unused(Model):
    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.unused_proj = nn.Linear(WIDTH, WIDTH)


class UnusedLayer(Model):
    def run(self, x):
        return _run([*self.layers[:2], *self.layers[3:]], x)


class UsedTwice(Model):
    class block(Block):
        def forward(self, x):
            return super().forward(super().forward(x))


class Frozen(Model):
    def __init__(self):
        super().__init__()
        for layer in self.layers[1:3]:
            layer.up_proj.weight.requires_grad_(False)
        self.layers[3].requires_grad_(False)


class CalledTwice(Model):
    """Boundaries in the order 0 1 2 3 0 1 2 3."""

    def run(self, x):
        return _run(self.layers, _run(self.layers, x))


class CalledTwiceInTurn(Model):
    def run(self, x):
        for layer in self.layers:
            x = layer(layer(x))
        return x


class Nested(Model):
    class block(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_proj = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.out_proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.out_proj(_run(self.blocks, self.in_proj(x)))


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict


class Containers(Model):
    """Outputs in a dataclass and a dict, of which one is used in place."""

    class block(Block):
        def forward(self, x):
            y = super().forward(x)
            return Output(y, OrderedDict(scaled=[y * 0.5]))

    def run(self, x):
        for layer in self.layers:
            out = layer(x)
            x = out.hidden + out.extra["scaled"][0]
        return x


class ViewInPlace(Model):
    """FSDP2 does not support this on the block itself, so only the root is under fully_shard."""

    class block(Block):
        def forward(self, x):
            y = super().forward(x)
            return y.view(y.shape)

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
            x.mul_(1.5)
        return x


class WeightUsedDirectly(Model):
    """x @ p and x * p save the parameter itself, not a view of it; bmm and einsum save other views."""

    class block(Block):
        def __init__(self):
            super().__init__()
            self.a_proj = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
            self.b_proj = nn.Parameter(torch.randn(1, WIDTH))
            self.c_proj = nn.Parameter(torch.randn(2, WIDTH, WIDTH // 2) * 0.1)

        def forward(self, x):
            x = x + x @ self.a_proj
            x = x * self.b_proj
            return super().forward(x + torch.einsum("bld,edf->blef", x, self.c_proj).flatten(2))


CASES = [
    Model, Tied, ReentrantCheckpoint, Checkpoint, CheckpointInside, ReentrantCheckpointInside, CheckpointedRegion,
    ReentrantCheckpointedRegion, Unused, UnusedLayer, UsedTwice, Frozen, CalledTwice, CalledTwiceInTurn, Nested,
    Containers, ViewInPlace, WeightUsedDirectly,
]  # fmt: skip


def one_name(name, parameter):
    """`projections` without the second name of a tied parameter."""
    return projections(name, parameter) and name != "head_proj.weight"


def reference_gradients(model, micros, world_size):
    """Mean over the ranks of each micro-batch's gradients, by name. `micros`: (ids, reduced at once?)."""
    total = {}
    local = {}
    for ids, sync in micros:
        loss = model(ids)
        loss.backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                local[name] = local[name] + p.grad if name in local else p.grad
            p.grad = None
        if sync:
            for name, gradient in local.items():
                parts = [torch.empty_like(gradient) for _ in range(world_size)]
                dist.all_gather(parts, gradient.contiguous())
                mean = parts[0].clone()
                for part in parts[1:]:
                    mean += part
                mean /= world_size
                total[name] = total[name] + mean if name in total else mean
            local = {}
    return total


def poison_released_windows(model):
    """From now on a window holds NaN from its release until it is filled again."""
    import dmuon

    ctx = dmuon.get_comm_ctx(model)
    windows = ctx.weights
    session = windows._session

    class Poisoned:
        released = 0

        def __getattr__(self, name):
            return getattr(session, name)

        def release(self, index, stream):
            for p in ctx.boundaries[index].params:
                p.weight.fill_(float("nan"))
            session.release(index, stream)
            self.released += 1

    windows._session = Poisoned()
    return windows._session


def daemon_gradients(model):
    """What the daemon reduced for the last step, by name."""
    import dmuon
    from dmuon import _native

    ctx = dmuon.get_comm_ctx(model)
    found = {}
    for p in ctx.params:
        data = torch.utils.dlpack.from_dlpack(ctx.session.read_state(p.param_name, _native.StateKind.MOMENTUM))
        found[p.param_name] = data.view(torch.float32).reshape(p.shape)
    return found


def check(rank, world_size, case, z3, micro_batches):
    import dmuon

    reference = make(case)
    model = make(case)
    select = one_name if case is Tied else projections
    optimizer = dedicate(
        model, world_size, z3, predicate=select, fsdp_layers=case is not ViewInPlace,
        muon={"lr": 0.0, "momentum": 0.0, "nesterov": False, "adamw_lr": 0.0, "adamw_weight_decay": 0.0},
    )  # fmt: skip
    windows = poison_released_windows(model) if z3 else None
    released = 0
    data = batches(3 * micro_batches, size=2 * world_size)
    checked = 0
    for step in range(3):
        micros = [shard(ids, rank, world_size) for ids in data[step * micro_batches : (step + 1) * micro_batches]]
        for ids in micros[:-1]:
            with dmuon.no_sync(model):
                model(ids).backward()
        model(micros[-1]).backward()
        if windows is not None:
            assert windows.released > released, "no boundary gave up its window: nothing is tested"
        optimizer.step()
        released = windows.released if windows is not None else 0
        assert not optimizer.last_step_skipped
        # In Z3 each micro-batch is reduced by itself.
        expected = reference_gradients(
            reference, [(ids, z3 or i == len(micros) - 1) for i, ids in enumerate(micros)], world_size
        )
        found = daemon_gradients(model)
        for name, gradient in found.items():
            if name not in expected:
                assert not gradient.any(), f"step {step}: '{name}' got a gradient, and PyTorch gives none"
                continue
            different = int((gradient != expected[name]).sum())
            assert different == 0, f"step {step}: '{name}': {different} of {gradient.numel()} elements differ"
            checked += 1
        optimizer.zero_grad()
    close(model)
    return checked


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_gradients_are_those_of_pytorch(ranks, case, z3, world_size):
    assert min(ranks(world_size, check, case, z3, 1)) > 0


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
@pytest.mark.parametrize("micro_batches", [2, 8])
@pytest.mark.parametrize("case", [Model, Unused, Checkpoint], ids=lambda c: c.__name__)
def test_accumulated_gradients_are_those_of_pytorch(ranks, case, micro_batches, z3, world_size):
    assert min(ranks(world_size, check, case, z3, micro_batches)) > 0
