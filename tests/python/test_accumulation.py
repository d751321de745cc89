"""Gradient accumulation: k micro-batches are one large batch, and Newton-Schulz runs once."""

import pytest
import torch

from support import reference
from support.models import batches, close, dedicate, make, shard, weights

STEPS = 5


def train(rank, world_size, z3, micro_batches):
    """Batches of eight sequences in `micro_batches` parts; weights and Newton-Schulz runs by step."""
    import dmuon

    model = make()
    ns = dmuon.NewtonSchulz("gram", deterministic=True)  # else fp16 on a GPU, which shows in the fourth digit
    muon = {"record_step_profile": True, "adamw_eps": 1e-3, "ns_backend": ns}
    optimizer = dedicate(model, world_size, z3, muon=muon)
    counts = []
    for ids in batches(STEPS, size=8 * world_size):
        optimizer.zero_grad()
        micros = shard(ids, rank, world_size).chunk(micro_batches)
        for micro in micros[:-1]:
            with dmuon.no_sync(model):
                (model(micro) / micro_batches).backward()
        (model(micros[-1]) / micro_batches).backward()
        optimizer.step()
        counts.append(optimizer.consume_last_step_profile()["ns_matrix_count"])
    result = weights(model)
    matrices = sum(p.is_owner for p in dmuon.get_dedicated_params(model))
    close(model)
    return result, counts, matrices


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_one_by_eight_is_eight_by_one(ranks, z3, world_size):
    whole = ranks(world_size, train, z3, 1)
    parts = ranks(world_size, train, z3, 8)
    for (once, counts_once, _), (accumulated, counts, _) in zip(whole, parts, strict=True):
        for name, value in once.items():
            assert reference.relative(accumulated[name], value) < 1e-4, name
        total = sum(matrices for _, _, matrices in parts)
        assert counts == counts_once == [total] * STEPS
    assert all(
        (parts[0][0][name] == other[0][name]).all() for other in parts for name in other[0]
    ), "the ranks do not agree"


def accumulate_without_no_sync(rank, world_size, z3):
    """Two backward passes before one step are a sum, as with p.grad."""
    result = []
    for double in (False, True):
        model = make()
        optimizer = dedicate(model, world_size, z3, muon={"adamw_eps": 1e-3})
        for ids in batches(3, size=4 * world_size):
            optimizer.zero_grad()
            mine = shard(ids, rank, world_size)
            if double:
                (model(mine) * 0.5).backward()
                (model(mine) * 0.5).backward()
            else:
                model(mine).backward()
            optimizer.step()
        result.append(weights(model))
        close(model)
    return max(reference.relative(result[1][name], result[0][name]) for name in result[0])


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_two_backward_passes_are_summed(ranks, z3):
    assert max(ranks(2, accumulate_without_no_sync, z3)) < 1e-5


def nested(rank, world_size):
    import dmuon

    model = make()
    optimizer = dedicate(model, world_size, False)
    ids = batches(1)[0]
    with dmuon.no_sync(model):
        with dmuon.no_sync(model):
            model(ids).backward()
        assert not dmuon.get_comm_ctx(model).syncing
        model(ids).backward()
        assert dmuon.get_comm_ctx(model).gradients.sent is False
    assert dmuon.get_comm_ctx(model).syncing
    with pytest.raises(RuntimeError, match="inside"), dmuon.no_sync(model):
        raise RuntimeError("inside")
    assert dmuon.get_comm_ctx(model).syncing
    model(ids).backward()
    optimizer.step()
    close(model)


def test_no_sync_nests_and_restores(ranks):
    ranks(2, nested)


def two_losses(rank, world_size, z3):
    """Two forwards, one backward: one micro."""
    import dmuon

    muon = {"ns_backend": dmuon.NewtonSchulz("gram", deterministic=True)}
    model = make()
    optimizer = dedicate(model, world_size, z3, muon=muon)
    a, b = batches(2)
    (model(a) + model(b)).backward()
    optimizer.step()
    first = weights(model)
    close(model)

    model = make()
    optimizer = dedicate(model, world_size, z3, muon=muon)
    model(torch.cat([a, b])).mul(2).backward()
    optimizer.step()
    second = weights(model)
    close(model)
    return max(reference.relative(second[name], first[name]) for name in first)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_one_backward_through_two_forwards(ranks, z3):
    assert max(ranks(2, two_losses, z3)) < 1e-5
