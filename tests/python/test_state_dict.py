"""Saving and loading a model with dedicated parameters: plain, full, exact, on any number of ranks."""

import copy
import pickle

import numpy as np
import pytest
import torch

from support.models import DEVICE, batches, close, dedicate, make, shard, weights


def train(rank, world_size, z3, path, steps=3, state=None):
    """Trains a little, saves by rank 0, and says what the weights are."""
    import dmuon

    model = make(seed=0 if state is None else 5)
    optimizer = dedicate(model, world_size, z3)
    if state is not None:
        dmuon.set_model_state_dict(model, torch.load(state))
    for ids in batches(steps, size=4 * world_size):
        optimizer.zero_grad()
        model(shard(ids, rank, world_size)).backward()
        optimizer.step()
    full = dmuon.get_model_state_dict(model)
    if rank == 0:
        torch.save(full, path)
    else:
        assert full == {}
    result = weights(model)
    close(model)
    return result


def evaluate(rank, world_size, z3, path):
    """A new job from different values, with the saved weights: its weights, and its loss on one batch."""
    import dmuon

    model = make(seed=9)
    optimizer = dedicate(model, world_size, z3)
    state = torch.load(path) if rank == 0 else {}
    dmuon.set_model_state_dict(model, state)
    with torch.no_grad():
        loss = model(batches(1)[0]).item()
    result = weights(model)
    # Training goes on from there.
    model(batches(1)[0]).backward()
    optimizer.step()
    moved = weights(model)
    assert all(not np.array_equal(moved[name], result[name]) for name in result if "proj" in name)
    close(model)
    return result, loss


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_saved_on_two_ranks_loads_into_a_plain_model_and_a_new_job_on_four(ranks, z3, tmp_path):
    path = tmp_path / "model.pt"
    trained = ranks(2, train, z3, path)[0]
    state = torch.load(path)
    plain = make(seed=7)
    plain.load_state_dict(state, strict=True)
    assert path.stat().st_size < 2 * sum(t.numel() * 4 for t in state.values()), "more than the model was saved"
    for name, p in plain.named_parameters():
        assert np.array_equal(p.detach().cpu().numpy(), trained[name]), name
    expected = plain(batches(1)[0]).item()
    for found, loss in ranks(4, evaluate, z3, path):
        assert all(np.array_equal(found[name], trained[name]) for name in trained)
        assert loss == pytest.approx(expected, rel=1e-6)


def plain_hooks(rank, world_size, z3):
    """state_dict and load_state_dict themselves, of the model and of a part of it."""
    model = make()
    optimizer = dedicate(model, world_size, z3)
    model(batches(1)[0]).backward()
    optimizer.step()
    state = model.state_dict()
    state.update({n: v.clone() for n, v in state.items() if "proj" not in n})  # FSDP2's are the live shards
    name = "layers.1.up_proj.weight"
    assert type(state[name]) is torch.Tensor and state[name].isfinite().all()
    assert state[name].untyped_storage().nbytes() == state[name].numel() * 4
    saved = weights(model)
    assert np.array_equal(state[name].cpu().numpy(), saved[name])

    optimizer.zero_grad()
    model(batches(2)[1]).backward()
    optimizer.step()
    assert not np.array_equal(weights(model)[name], saved[name])
    model.load_state_dict(state)
    assert all(np.array_equal(value, saved[n]) for n, value in weights(model).items())
    with torch.no_grad():
        first = model(batches(1)[0])

    part = {"up_proj.weight": torch.full((40, 16), 0.25)}
    model.layers[1].load_state_dict(part, strict=False)
    assert (weights(model)[name] == 0.25).all()
    assert (model.layers[1].state_dict()["up_proj.weight"] == 0.25).all()
    assert np.array_equal(weights(model)["layers.0.up_proj.weight"], saved["layers.0.up_proj.weight"])
    with torch.no_grad():
        assert model(batches(1)[0]) != first
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, name: torch.zeros(2, 2)})
    model.load_state_dict(state)
    with torch.no_grad():
        assert model(batches(1)[0]) == first
    close(model)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_state_dict_and_load_state_dict_are_as_of_a_plain_model(ranks, z3):
    ranks(2, plain_hooks, z3)


def bad_state(rank, world_size):
    import dmuon

    model = make()
    dedicate(model, world_size, True)
    good = dmuon.get_model_state_dict(model, rank0_only=False)
    before = weights(model)
    name = "layers.2.down_proj.weight"
    for bad, message in (
        ({k: v for k, v in good.items() if k != name}, f"missing key '{name}'"),
        ({**good, "layers.9.x": good[name]}, r"unexpected key 'layers\.9\.x'"),
        ({**good, name: good[name][:3]}, rf"'{name}': expected shape \(16, 40\), got \(3, 40\)"),
    ):
        with pytest.raises(ValueError, match=message):
            dmuon.set_model_state_dict(model, bad)
    assert all(np.array_equal(value, before[n]) for n, value in weights(model).items())
    close(model)


def test_a_wrong_state_dict_is_named_and_nothing_is_loaded(ranks):
    ranks(2, bad_state)


def no_copies(rank, world_size):
    import dmuon
    from torch.distributed.device_mesh import init_device_mesh

    from support.models import projections

    model = make()
    dmuon.dedicate_params(model, init_device_mesh(DEVICE, (world_size,)), projections)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(model)
    close(model)


def test_a_model_in_a_session_is_not_copied_or_pickled(ranks):
    ranks(1, no_copies)


def in_place(rank, world_size, z3):
    """torch.nn.init and no_grad writes after Muon reach the masters."""
    model = make(depth=1)
    optimizer = dedicate(model, world_size, z3, muon={"lr": 0.0, "adamw_lr": 0.0, "adamw_weight_decay": 0.0})
    weight = model.layers[0].up_proj.weight
    if z3:
        with pytest.raises(RuntimeError, match="not in memory"):
            torch.nn.init.constant_(weight, 0.5)
    else:
        torch.nn.init.constant_(weight, 0.5)
        model(batches(1)[0]).backward()
        optimizer.step()
        assert (weights(model)["layers.0.up_proj.weight"] == 0.5).all()
        assert (weight == 0.5).all()
    close(model)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_weights_written_in_place(ranks, z3):
    ranks(2, in_place, z3)


def meta(rank, world_size):
    """dedicate_params on the meta device, then fully_shard, to_empty and an own initialisation."""
    import dmuon
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from support.models import Toy, projections

    with torch.device("meta"):
        model = Toy()
    mesh = init_device_mesh(DEVICE, (world_size,))
    dmuon.dedicate_params(model, mesh, projections)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="meta device"):
        dmuon.Muon(model)
    model.to_empty(device=DEVICE)
    torch.manual_seed(rank)  # ranks differ: the owner's values win
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    optimizer = dmuon.Muon(model)
    model(batches(1)[0]).backward()
    optimizer.step()
    result = weights(model)
    close(model)
    return result


def test_a_model_from_the_meta_device(ranks):
    one, two = ranks(2, meta)
    assert all(np.array_equal(one[name], two[name]) for name in one)
