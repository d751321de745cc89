"""What a user can do wrong: each is a clear error, and the daemon and other sessions are unharmed."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support.models import DEVICE, batches, close, dedicate, make, projections, shard, weights


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


@contextlib.contextmanager
def recorded():
    handler, logger = Records(), logging.getLogger("dmuon")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def mesh_of(world_size):
    return init_device_mesh(DEVICE, (world_size,))


# ---- selecting parameters


def nothing_matches(rank, world_size):
    import dmuon

    model = make()
    mesh = mesh_of(world_size)
    with recorded() as lines:
        assert dmuon.dedicate_params(model, mesh, lambda n, p: False) == {}
    assert lines == [("WARNING", "dedicate_params: no parameters matched the predicate")]
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    first = model(batches(1)[0])
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batches(1)[0])
        loss.backward()
        with dmuon.no_sync(model):
            pass
        optimizer.step()
    assert model(batches(1)[0]) < first
    assert len(dmuon.get_model_state_dict(model, rank0_only=False)) == 14


def test_a_predicate_that_matches_nothing(ranks):
    ranks(2, nothing_matches)


def some_ranks_only(rank, world_size):
    import dmuon

    def different_count(name, p):
        return projections(name, p) and (rank == 0 or name != "layers.1.up_proj.weight")

    def different_names(name, p):
        return name == f"layers.{rank}.up_proj.weight"

    missing = r"rank 0: 6, rank 1: 5.*'layers\.1\.up_proj\.weight' is selected on rank 0 only"
    with pytest.raises(ValueError, match=missing):
        dmuon.dedicate_params(make(), mesh_of(world_size), different_count)
    with pytest.raises(ValueError, match=r"'layers\.0\.up_proj\.weight' is selected on rank 0 only"):
        dmuon.dedicate_params(make(), mesh_of(world_size), different_names)
    with pytest.raises(ValueError, match="is selected on rank 0 only"):
        dmuon.dedicate_params(make(), mesh_of(world_size), lambda n, p: rank == 0 and projections(n, p))
    with pytest.raises(ValueError, match=r"is \(\(40, 16\).* on rank 0 and \(\(48, 16\).* on rank 1"):
        dmuon.dedicate_params(make(hidden=40 + 8 * rank), mesh_of(world_size), projections)


def test_a_predicate_that_matches_on_some_ranks_only(ranks):
    started = time.monotonic()
    ranks(2, some_ranks_only)
    assert time.monotonic() - started < 60, "it was a wait and not an error"


def one_rank_fails(rank, world_size):
    import dmuon

    def predicate(name, p):
        if rank == 1:
            raise KeyError("a mistake of the user")
        return projections(name, p)

    with pytest.raises(KeyError if rank == 1 else RuntimeError, match="a mistake of the user"):
        dmuon.dedicate_params(make(), mesh_of(world_size), predicate)


def test_an_exception_in_the_predicate_of_one_rank_reaches_all(ranks):
    ranks(2, one_rank_fails)


def wrong_selection(rank, world_size):
    import dmuon

    mesh = mesh_of(world_size)
    with pytest.raises(ValueError, match=r"'layers\.0\.norm\.weight' of shape \(16,\) is on the route 'muon'"):
        dmuon.dedicate_params(make(), mesh, lambda n, p: "norm" in n)

    tied = make()
    tied.head.weight = tied.embedding.weight
    with pytest.raises(ValueError, match=r"'embedding\.weight' is shared with 'head\.weight'"):
        dmuon.dedicate_params(tied, mesh, lambda n, p: p.ndim == 2)

    sharded = make()
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(ValueError, match=r"'layers\.0\.up_proj\.weight' is already a DTensor: .* before fully_shard"):
        dmuon.dedicate_params(sharded, mesh, projections)

    twice = make()
    dmuon.dedicate_params(twice, mesh, projections)
    with pytest.raises(ValueError, match="already called"):
        dmuon.dedicate_params(twice, mesh, projections)
    close(twice)

    with pytest.raises(ValueError, match=r"no module above parameter 'layers\.0\.up_proj\.weight'"):
        dmuon.dedicate_params(make(), mesh, projections, hook_boundary_predicate=lambda m: False)
    for argument in ("replicate_mesh", "param_policy", "param_policy_fn", "max_owners_per_group", "blocks_fn"):
        with pytest.raises(NotImplementedError, match=argument):
            dmuon.dedicate_params(make(), mesh, projections, **{argument: 1})
    with pytest.raises(ValueError, match="unknown route 'adam'"):
        dmuon.dedicate_params(make(), mesh, projections, route_hint_fn=lambda n, p: "adam")
    with pytest.raises(NotImplementedError, match="sharded_adamw"):
        dmuon.dedicate_params(make(), mesh, projections, route_hint_fn=lambda n, p: "sharded_adamw")


def test_a_selection_that_cannot_be_is_named(ranks):
    ranks(2, wrong_selection)


def boundaries(rank, world_size):
    import dmuon

    from support.models import Block

    mesh = mesh_of(world_size)

    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vision = torch.nn.Sequential(Block(8, 16), Block(8, 16))
            self.text = make(depth=2)
            self.last_proj = torch.nn.Linear(8, 8, bias=False)

    def of(**options):
        model = make(Towers)
        dmuon.dedicate_params(model, mesh, projections, **options)
        found = {b.name for b in dmuon.get_comm_ctx(model).boundaries}
        close(model)
        return found

    assert of() == {"", "text.layers.0", "text.layers.1"}
    assert of(hook_boundary_predicate=lambda m: isinstance(m, Block), hook_boundary_strict=False) == {
        "vision.0", "vision.1", "text.layers.0", "text.layers.1", "last_proj",
    }  # fmt: skip
    model = make(Towers)
    dmuon.dedicate_params(model, mesh, projections, hook_boundary_resolver=lambda n, p: model.vision)
    assert [b.name for b in dmuon.get_comm_ctx(model).boundaries] == ["vision"]
    close(model)


def test_boundaries_are_where_the_rules_say(ranks):
    ranks(1, boundaries)


def assignment(rank, world_size):
    import dmuon

    model = make()
    with recorded() as lines:
        owners = dmuon.dedicate_params(model, mesh_of(world_size), projections)
    assert set(owners) == {p for n, p in model.named_parameters() if projections(n, p)}
    every = dmuon.get_dedicated_params(model)
    assert [p.param_name for p in every] == [n for n, p in model.named_parameters() if projections(n, p)]
    owned = [dmuon.get_owned_params(model, r) for r in range(world_size)]
    assert sorted(p.param_name for o in owned for p in o) == sorted(p.param_name for p in every)
    assert all(owned), "a rank owns nothing"
    assert [p.is_owner for p in every] == [p.owner_rank == rank for p in every]
    assert dmuon.get_owned_params(model, (1, 0)) == owned[1]
    for bad, error in ((True, TypeError), (1.0, TypeError), ((0,), TypeError), (-1, ValueError)):
        with pytest.raises(error):
            dmuon.get_owned_params(model, bad)
    if rank == 0:
        level, text = lines[-1]
        assert level == "INFO" and text.startswith("dedicate_params: 6 params assigned to 2 ranks, imbalance=")
    dmuon.get_comm_ctx(model).barrier()  # one that has left ends what another may still be about to hear
    close(model)
    return {p.param_name: p.owner_rank for p in every}


def test_the_placement_is_told_and_the_same_on_all_ranks(ranks):
    one, two = ranks(2, assignment)
    assert one == two


def ranks_start_differently(rank, world_size):
    import dmuon

    model = make(seed=rank)
    with recorded() as lines:
        dedicate(model, world_size, False)
    warned = [text for level, text in lines if level == "WARNING"]
    assert len(warned) == (1 if rank == 0 else 0)
    assert all("'layers.0.up_proj.weight'" in text for text in warned)
    owner = {p.param_name: p.owner_rank for p in dmuon.get_dedicated_params(model)}
    found = weights(model)
    for name, who in owner.items():
        assert np.array_equal(found[name], make(seed=who).state_dict()[name].cpu().numpy()), name
    close(model)


def test_ranks_that_start_differently_are_warned_and_the_owners_values_win(ranks):
    ranks(2, ranks_start_differently)


# ---- parameters that leave their arena


def moved(rank, world_size, z3, how):
    model = make()
    optimizer = dedicate(model, world_size, z3)
    ids = batches(1)[0]
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    message = "is not in memory" if z3 else "was moved to other memory as torch.bfloat16"
    if how == "to":
        with pytest.raises(RuntimeError, match=rf"'layers\.0\.up_proj\.weight'.*{message}"):
            model.layers.to(torch.bfloat16)
            model(ids)
    else:
        state = {name: value.clone() for name, value in model.layers.state_dict().items()}
        model.layers.load_state_dict(state, assign=True)
        for call in (lambda: model(ids), optimizer.step):
            with pytest.raises(RuntimeError, match=r"'layers\.0\.up_proj\.weight' was replaced.*assign=True"):
                call()
    close(model)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
@pytest.mark.parametrize("how", ["to", "assign"])
def test_a_parameter_moved_out_of_its_arena(ranks, how, z3):
    ranks(2, moved, z3, how)


# ---- gradients that are dropped


def dropped_on_all(rank, world_size, z3):
    """A backward without a step, dropped: the same bits as if it had not been."""
    results = []
    for extra in (False, True):
        model = make()
        optimizer = dedicate(model, world_size, z3)
        data = batches(4)
        for ids in data[:3]:
            if extra:
                model(shard(data[3], rank, world_size)).backward()
                optimizer.zero_grad()
                optimizer.zero_grad()
            model(shard(ids, rank, world_size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
        close(model)
    return all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_a_backward_dropped_by_zero_grad_on_all_ranks(ranks, z3):
    assert all(ranks(2, dropped_on_all, z3))


def dropped_on_one(rank, world_size, z3):
    import dmuon

    model = make()
    optimizer = dedicate(model, world_size, z3)
    ids = batches(1)[0]
    model(ids).backward()
    if rank == 1:
        optimizer.zero_grad()
    before = weights(model)
    with pytest.raises(dmuon.DMuonError, match=r"zero_grad after a backward without a step.*generation by rank"):
        optimizer.step()
    assert all(np.array_equal(value, before[name]) for name, value in weights(model).items())
    optimizer.zero_grad()
    model(ids).backward()
    optimizer.step()
    result = weights(model)
    close(model)
    return result


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_a_backward_dropped_by_zero_grad_on_one_rank(ranks, z3):
    one, two = ranks(2, dropped_on_one, z3)
    assert all(np.array_equal(one[name], two[name]) for name in one)


def groups_differ(rank, world_size):
    model = make()
    optimizer = dedicate(model, world_size, False)
    model(batches(1)[0]).backward()
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"group 'default/muon' .* of rank\(s\) 1 differs"):
        optimizer.step()
    close(model)


def test_groups_that_differ(ranks):
    ranks(2, groups_differ)


# ---- jobs


def two_jobs(rank, world_size):
    """Two models in one job, in turn: neither disturbs the other."""
    import dmuon

    def alone():
        model = make()
        optimizer = dedicate(model, world_size, True)
        for ids in batches(3):
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
        result = weights(model)
        close(model)
        return result

    expected = alone()
    models = [make(), make()]
    optimizers = [dedicate(model, world_size, z3) for model, z3 in zip(models, (True, False), strict=True)]
    assert len({dmuon.get_comm_ctx(model).job for model in models}) == 2
    for ids in batches(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
    for model in models:
        assert all(np.array_equal(value, expected[name]) for name, value in weights(model).items())
        close(model)


def test_two_sessions_at_once_do_not_disturb_each_other(ranks):
    ranks(2, two_jobs)


def gone(rank, world_size):
    """A model and its optimizer that are dropped leave no descriptor, no mapping and no attachment."""
    import gc
    import weakref

    import dmuon

    def once(z3):
        model = make()
        optimizer = dedicate(model, world_size, z3)
        model(batches(1)[0]).backward()
        optimizer.step()
        return weakref.ref(dmuon.get_comm_ctx(model))

    def left():
        gc.collect()
        torch.cuda.empty_cache()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:" in line for line in maps)

    once(True)
    before = left()
    contexts = [once(z3) for z3 in (True, False) * 3]
    after = left()
    assert all(ref() is None for ref in contexts)
    assert after == before, f"fds and mappings: {before} before, {after} after"


def test_a_model_that_is_dropped_leaves_nothing(ranks):
    ranks(2, gone)


def die(rank, world_size, when):
    model = make()
    optimizer = dedicate(model, world_size, True)
    ids = batches(1)[0]
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(ids).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()


def test_a_trainer_killed_ends_the_others_step_by_name(daemon):
    from support.ranks import RankError, Ranks

    pool = Ranks(2, daemon.endpoint)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(die, "step", timeout=60)
    assert caught.value.rank == 0 and caught.value.kind in ("StepAborted", "DaemonUnavailable", "DMuonError")
    assert "rank 1" in caught.value.text
    assert time.monotonic() - started < 50
    assert daemon.alive()


def test_a_job_after_a_killed_job(ranks, daemon):
    ranks(2, assignment)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and daemon.sessions():
        pass
    assert daemon.sessions() == [], "a session was left over"


SLEEPER = """
import os, sys, threading, torch.distributed as dist
from support.models import batches, dedicate, make
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
model = make()
optimizer = dedicate(model, 2, False)
model(batches(1)[0]).backward()

def tell_when_it_waits(main):
    # The call into the daemon is the only one below _daemon_step that leaves the frame where it is.
    last, seen = None, 0
    while seen < 20:
        frame = sys._current_frames()[main]
        where = (frame.f_code.co_name, frame.f_lasti)
        seen = seen + 1 if where == last and where[0] == "_daemon_step" else 0
        last = where
        threading.Event().wait(0.01)
    print("waiting", flush=True)

if rank == 0:
    threading.Thread(target=tell_when_it_waits, args=[threading.get_ident()], daemon=True).start()
    optimizer.step()  # rank 1 never comes
else:
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_ctrl_c_in_a_wait_raises_keyboard_interrupt(daemon, tmp_path):
    environment = {**os.environ, "DMUON_ENDPOINT": daemon.endpoint}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SLEEPER, str(rank), str(tmp_path / "store")], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        waiter, other = processes
        assert other.stdout.readline() == "ready\n"
        assert waiter.stdout.readline() == "waiting\n"
        waiter.send_signal(signal.SIGINT)
        _, errors = waiter.communicate(timeout=30)
        assert "KeyboardInterrupt" in errors and "session.step" in errors
        assert waiter.returncode in (1, 130, -signal.SIGINT)
        other.stdin.close()
        assert other.wait(30) is not None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert daemon.alive()
