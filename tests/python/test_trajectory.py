"""Whole trajectories against the float64 reference of docs/numerics.md."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from support import reference
from support.models import DEVICE, batches, close, dedicate, make, projections, shard, weights

STEPS = 20
LR = 0.02


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        for name in "qkvo":
            setattr(self, f"{name}_proj", nn.Linear(width, width, bias=False))

    def forward(self, x):
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, hidden, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self, width=32, hidden=88, heads=4, depth=2, vocabulary=23):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, hidden, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embedding(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


DATA = {"size": 16, "length": 13}


def reference_run(record=None):
    """float64 from end to end, one process, whole batches: the weights by name. `record`: list for fp32 gradients."""
    model = make(Llama)
    start = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    model = model.double()
    states = {
        name: reference.Muon(start[name], lr=LR) if projections(name, p) else reference.AdamW(start[name])
        for name, p in model.named_parameters()
    }
    for ids in batches(STEPS, **DATA):
        model.zero_grad()
        model(ids).backward()
        gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
        if record is not None:
            record.append({name: g.astype(np.float32) for name, g in gradients.items()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                states[name].step(gradients[name])
                p.copy_(torch.from_numpy(states[name].weight))
    return {name: state.weight for name, state in states.items()}


def train(rank, world_size, z3, backend, repeat=1):
    import dmuon

    digests = set()
    for _ in range(repeat):
        model = make(Llama)
        ns = dmuon.NewtonSchulz(backend, deterministic=True)
        optimizer = dedicate(model, world_size, z3, muon={"lr": LR, "ns_backend": ns})
        for ids in batches(STEPS, **DATA):
            optimizer.zero_grad()
            model(shard(ids, rank, world_size)).backward()
            optimizer.step()
        result = weights(model)
        digest = hashlib.sha256()
        for name in sorted(result):
            digest.update(result[name].tobytes())
        # Also what this rank's own memory holds, not only what the state dict says.
        if not z3:
            dmuon.wait_all_post_step_broadcasts(model)
            for p in dmuon.get_dedicated_params(model):
                assert np.array_equal(p.tensor.detach().cpu().numpy(), result[p.param_name]), p.param_name
        digests.add(digest.hexdigest())
        close(model)
    assert len(digests) == 1, "two runs gave different bits"
    return digests.pop(), result


def replay(rank, world_size, recorded, backend):
    """The dedicated parameters, fed with recorded gradients."""
    import dmuon

    model = make(Llama)
    ns = dmuon.NewtonSchulz(backend, deterministic=True)
    optimizer = dedicate(model, world_size, False, muon={"lr": LR, "ns_backend": ns})
    for gradients in recorded:
        for p in dmuon.get_dedicated_params(model):
            p.tensor.grad = torch.from_numpy(gradients[p.param_name]).to(DEVICE)
        optimizer.step()
    result = weights(model)
    close(model)
    return {name: result[name] for name in result if "proj" in name}


def worst(found, exact):
    return max((reference.relative(found[name], exact[name]), name) for name in found)


@pytest.mark.parametrize("backend, bound", [("direct", 1e-5), ("gram", 1e-4)])
def test_recorded_gradients_replayed(ranks, backend, bound):
    recorded = []
    reference_run(record=recorded)
    start = make(Llama)
    exact = {}
    for name, p in start.named_parameters():
        if projections(name, p):
            state = reference.Muon(p.detach().numpy(), lr=LR)
            for gradients in recorded:
                state.step(gradients[name])
            exact[name] = state.weight
    for world_size in (1, 2):
        for found in ranks(world_size, replay, recorded, backend):
            error, name = worst(found, exact)
            print(f"{backend}, {world_size} ranks: {error:.1e} ('{name}'), bound {bound:.0e}")
            assert error <= bound


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_end_to_end_on_any_number_of_ranks(ranks, world_size):
    exact = reference_run()
    for backend in ("direct", "gram"):
        bits = set()
        for z3 in (False, True):
            for digest, found in ranks(world_size, train, z3, backend):
                bits.add(digest)
                error, name = worst(found, exact)
                assert error <= 2e-4, f"'{name}' is {error:.1e} off"
            print(f"{backend}, {world_size} ranks, {'z3' if z3 else 'z2'}: {error:.1e} ('{name}')")
        assert len(bits) == 1, "ranks, Z2 and Z3 do not give the same bits"


def test_two_runs_give_the_same_bits(ranks):
    assert len({digest for digest, _ in ranks(2, train, True, "gram", repeat=2)}) == 1
