"""dmuon.Muon as a torch.optim.Optimizer."""

import inspect
import math

import numpy as np
import pytest
import torch

from support import reference
from support.models import DEVICE, batches, close, dedicate, make, projections, shard, weights


def run(rank, world_size, z3=False, steps=4, prepare=None, muon=None, **options):
    model = make()
    optimizer = dedicate(model, world_size, z3, muon=muon, **options)
    each = prepare(optimizer) if prepare is not None else None
    for ids in batches(steps, size=4 * world_size):
        optimizer.zero_grad()
        model(shard(ids, rank, world_size)).backward()
        optimizer.step()
        if each is not None:
            each()
    result = weights(model)
    close(model)
    return result


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def _cosine(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(step / 4 * math.pi))).step


def _by_hand(optimizer):
    step = 0
    base = [group["lr"] for group in optimizer.param_groups]

    def each():
        nonlocal step
        step += 1
        for lr, group in zip(base, optimizer.param_groups, strict=True):
            group["lr"] = lr * (0.5 * (1 + math.cos(step / 4 * math.pi)))

    return each


def scheduled(rank, world_size):
    by_scheduler = run(rank, world_size, prepare=_cosine)
    by_hand = run(rank, world_size, prepare=_by_hand)
    constant = run(rank, world_size)
    assert same(by_scheduler, by_hand)
    return max(reference.relative(constant[name], by_hand[name]) for name in constant)


def test_a_scheduler_drives_both_groups(ranks):
    assert min(ranks(2, scheduled)) > 1e-3, "the scheduler changed nothing"


def edited(rank, world_size):
    """Each key, edited before the only step, against the same value from the start."""
    changed = 0
    plain = run(rank, world_size, steps=2)
    for index, key, value, argument in (
        (0, "lr", 0.1, "lr"),
        (0, "weight_decay", 0.5, "weight_decay"),
        (0, "momentum", 0.5, "momentum"),
        (1, "lr", 0.1, "adamw_lr"),
        (1, "weight_decay", 0.5, "adamw_weight_decay"),
        (1, "betas", (0.5, 0.6), "adamw_betas"),
        (1, "eps", 1e-2, "adamw_eps"),
    ):

        def edit(optimizer, index=index, key=key, value=value):
            optimizer.param_groups[index][key] = value

        result = run(rank, world_size, steps=2, prepare=edit)
        assert same(result, run(rank, world_size, steps=2, muon={argument: value})), key
        assert not same(result, plain), f"'{key}' is without effect"
        changed += 1
    return changed


def test_what_is_written_into_a_group_counts_at_the_next_step(ranks):
    ranks(2, edited)


def options(rank, world_size):
    """Options that change the result, against the float64 reference."""
    import dmuon

    checked = []
    for muon in (
        {"adjust_lr": "original"},
        {"adjust_lr": "spectral"},
        {"adjust_lr": "none"},
        {"nesterov": False},
        {"weight_decay": 0.3, "momentum": 0.5},
        {"lr": 0.1},
    ):
        model = make()
        start = {n: p.detach().cpu().numpy().copy() for n, p in model.named_parameters()}
        ns = dmuon.NewtonSchulz("direct", deterministic=True)
        optimizer = dedicate(model, world_size, False, muon={**muon, "ns_backend": ns})
        exact = {
            p.param_name: reference.Muon(start[p.param_name], **{"lr": 0.02, **muon})
            for p in dmuon.get_dedicated_params(model)
        }
        generator = np.random.default_rng(3)
        for _ in range(3):
            for p in dmuon.get_dedicated_params(model):
                gradient = generator.standard_normal(tuple(p.shape)).astype(np.float32)
                exact[p.param_name].step(gradient)
                p.tensor.grad = torch.from_numpy(gradient).to(DEVICE)
            optimizer.step()
        found = weights(model)
        checked.append(max(reference.relative(found[name], state.weight) for name, state in exact.items()))
        close(model)
    return checked


def test_options_follow_the_reference(ranks):
    for errors in ranks(2, options):
        assert max(errors) < 1e-5, errors


def adamw_route(rank, world_size, z3):
    """All trainable parameters on the daemon's adamw route against torch's AdamW on the whole batch."""
    model = make()
    torch_model = make()
    torch_optimizer = torch.optim.AdamW(torch_model.parameters(), lr=3e-3, weight_decay=0.1)
    optimizer = dedicate(
        model, world_size, z3, predicate=lambda n, p: True, route_hint_fn=lambda n, p: "adamw",
        muon={"adamw_lr": 3e-3, "adamw_weight_decay": 0.1},
    )  # fmt: skip
    assert optimizer.param_groups[0]["params"] == []
    worst = 0.0
    for ids in batches(10, size=4 * world_size):
        optimizer.zero_grad()
        torch_optimizer.zero_grad()
        model(shard(ids, rank, world_size)).backward()
        torch_model(ids).backward()
        optimizer.step()
        torch_optimizer.step()
    found = weights(model)
    for name, p in torch_model.named_parameters():
        worst = max(worst, reference.relative(found[name], p.detach().cpu().numpy()))
    close(model)
    return worst


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_the_adamw_route_is_torchs_adamw(ranks, z3, world_size):
    # One rank computes the same gradients; two add them up in another order, which Adam's quotient magnifies.
    assert max(ranks(world_size, adamw_route, z3)) < (1e-6 if world_size == 1 else 1e-4)


def asynchronous(rank, world_size, z3):
    return same(
        run(rank, world_size, z3, muon={"replicate_async": True}),
        run(rank, world_size, z3, muon={"replicate_async": False}),
    )


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_waiting_for_the_publication_changes_no_bit(ranks, z3):
    assert all(ranks(2, asynchronous, z3))


def nonfinite(rank, world_size, where):
    """An inf on rank 1 only, in a dedicated or in an FSDP2 gradient."""
    model = make()
    optimizer = dedicate(model, world_size, False)
    data = [shard(ids, rank, world_size) for ids in batches(3, size=4 * world_size)]
    model(data[0]).backward()
    optimizer.step()
    before = weights(model)
    optimizer.zero_grad()

    model(data[1]).backward()
    if where == "fsdp" and rank == 1:
        local = [p.grad.to_local() for p in optimizer.param_groups[1]["params"]]
        next(gradient for gradient in local if gradient.numel()).fill_(math.inf)
    if where == "dedicated":
        optimizer.zero_grad()
        loss = model(data[1]) * (math.inf if rank == 1 else 1.0)
        loss.backward()
    optimizer.step()
    assert optimizer.last_step_skipped
    assert same(weights(model), before), "a skipped step changed weights"
    optimizer.zero_grad()

    model(data[2]).backward()
    optimizer.step()
    assert not optimizer.last_step_skipped
    after = weights(model)
    assert not same(after, before)
    assert all(np.isfinite(value).all() for value in after.values())
    close(model)


@pytest.mark.parametrize("where", ["fsdp", "dedicated"])
def test_a_nonfinite_gradient_on_one_rank_skips_the_step_on_all(ranks, where):
    ranks(2, nonfinite, where)


def nonfinite_error(rank, world_size):
    import dmuon

    model = make()
    optimizer = dedicate(model, world_size, False, muon={"nonfinite": "error"})
    before = weights(model)
    (model(batches(1)[0]) * math.nan).backward()
    with pytest.raises(dmuon.DMuonError, match="not finite"):
        optimizer.step()
    optimizer.zero_grad()
    assert same(weights(model), before)
    model(batches(1)[0]).backward()
    optimizer.step()
    close(model)


def test_nonfinite_error_raises_on_all_ranks_and_the_session_goes_on(ranks):
    ranks(2, nonfinite_error)


def contract(rank, world_size):
    import dmuon

    model = make()
    optimizer = dedicate(model, world_size, True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    muon, adamw = optimizer.param_groups
    own = set(model.parameters())
    assert all(p in own for group in optimizer.param_groups for p in group["params"])
    assert [g["group_name"] for g in optimizer.param_groups] == ["default/muon", "default/adamw"]
    assert (muon["lr"], muon["momentum"], adamw["lr"], adamw["betas"]) == (0.02, 0.95, 1e-3, (0.9, 0.999))
    assert len(muon["params"]) == len(dmuon.get_dedicated_params(model)) == 6
    assert "set_to_none" in inspect.signature(optimizer.zero_grad).parameters

    order = []
    optimizer.register_step_pre_hook(lambda *a: order.append("pre"))
    optimizer.register_step_post_hook(lambda *a: order.append("post"))

    def closure():
        order.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(batches(1)[0])
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert order == ["pre", "closure", "post"]
    assert optimizer.step() is None  # no gradient anywhere: a step that changes nothing
    with pytest.raises(NotImplementedError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({}), lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(RuntimeError, match="already has"):
        dmuon.Muon(model)
    close(model)


def test_it_is_a_torch_optimizer(ranks):
    ranks(2, contract)


def missing_gradients(rank, world_size):
    """Parameters without a gradient keep weights and momentum, also under weight decay."""
    import dmuon

    model = make()
    optimizer = dedicate(model, world_size, False, muon={"weight_decay": 0.1})
    model.layers[1].requires_grad_(False)
    for ids in batches(2):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    start = make().state_dict()
    after = weights(model)
    for name in after:
        unchanged = np.array_equal(after[name], start[name].cpu().numpy())
        assert unchanged == name.startswith("layers.1."), name
    model.layers[1].requires_grad_(True)
    model(batches(1)[0]).backward()
    optimizer.step()
    assert not np.array_equal(weights(model)["layers.1.up_proj.weight"], after["layers.1.up_proj.weight"])
    assert dmuon.get_dedicated_params(model)[2].param_name == "layers.1.up_proj.weight"
    close(model)


def test_a_parameter_without_gradient_is_left_alone(ranks):
    ranks(2, missing_gradients)


def bf16(rank, world_size, z3):
    """Mixed precision: bf16 weights in forward, fp32 masters in the daemon and in the state dict."""
    import dmuon
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make()
    mesh = init_device_mesh(DEVICE, (world_size,))
    dmuon.dedicate_params(model, mesh, projections, reshard_after_forward=z3)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model, lr=1e-4)
    assert all(p.param_dtype == torch.bfloat16 for p in dmuon.get_dedicated_params(model))
    losses = []
    for ids in batches(1) * 20:
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict()
    moved = 0
    for p in dmuon.get_dedicated_params(model):
        value = state[p.param_name]
        assert value.dtype == torch.float32
        moved += int((value != value.bfloat16().float()).sum())
    assert moved > 0, "the masters are only bf16"
    close(model)
    return losses


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_mixed_precision_keeps_fp32_masters(ranks, z3):
    (losses, other) = ranks(2, bf16, z3)
    assert losses == other
    assert losses[-1] < losses[0]


def stale_graph(rank, world_size, z3):
    model = make()
    optimizer = dedicate(model, world_size, z3)
    ids = batches(1)[0]
    loss = model(ids)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    model(ids).backward()
    optimizer.step()
    close(model)


@pytest.mark.parametrize("z3", [False, True], ids=["z2", "z3"])
def test_a_graph_from_before_the_step_raises_as_in_torch(ranks, z3):
    ranks(2, stale_graph, z3)


def released(rank, world_size):
    import dmuon

    model = make(depth=6)
    optimizer = dedicate(model, world_size, True)
    model(batches(1)[0]).backward()
    optimizer.step()
    weight = model.layers[0].up_proj.weight
    assert weight.shape == (40, 16) and weight.requires_grad and weight.grad is None
    for use in (lambda: weight + 1, lambda: weight.sum(), lambda: weight @ weight.T, lambda: weight.to(torch.bfloat16)):
        with pytest.raises(RuntimeError, match=r"'layers\.0\.up_proj\.weight' \(boundary 'layers\.0'\) is not in"):
            use()
    assert "layers.0.up_proj.weight" in repr(weight)
    assert len(list(model.named_parameters())) == 26 and dmuon.get_dedicated_params(model)[0].numel == 640
    loss = model(batches(1)[0])
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)
    close(model)


def test_a_released_weight_raises_its_name(ranks):
    ranks(1, released)


def side_output(rank, world_size):
    """A loss computed from weights inside a boundary but not returned by it."""

    class Side(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(self.Layer() for _ in range(5))

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a_proj = torch.nn.Linear(8, 8)
                self.b_proj = torch.nn.Linear(8, 8)

            def forward(self, x):
                y = self.a_proj(x)
                self.side = self.b_proj(x.detach()).square().mean()
                return y

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    model = make(Side)
    dedicate(model, world_size, True)
    loss = model(torch.randn(4, 8, device=DEVICE)) + sum(layer.side for layer in model.layers)
    with pytest.raises(RuntimeError, match=r"'layers\.\d\.b_proj\..*' ran without its weights"):
        loss.backward()
    close(model)


def test_a_side_output_in_z3_is_an_error_and_not_wrong_data(ranks):
    ranks(1, side_output)


def arguments(rank, world_size):
    import dmuon

    model = make()
    for kwargs, error in (
        ({"lr": -1.0}, ValueError),
        ({"lr": math.nan}, ValueError),
        ({"lr": "a"}, TypeError),
        ({"momentum": "x"}, TypeError),
        ({"adamw_betas": 3}, TypeError),
        ({"momentum": 1.0}, ValueError),
        ({"weight_decay": -0.1}, ValueError),
        ({"adamw_betas": (0.9, 1.0)}, ValueError),
        ({"adamw_eps": -1e-8}, ValueError),
        ({"ns_steps": 0}, ValueError),
        ({"ns_backend": "cubic"}, ValueError),
        ({"ns_backend": 3}, TypeError),
        ({"adjust_lr": "rms"}, ValueError),
        ({"nonfinite": "ignore"}, ValueError),
        ({"param_groups": []}, NotImplementedError),
    ):
        with pytest.raises(error):
            dmuon.Muon(model, **kwargs)
    with pytest.raises(TypeError, match="takes the model"):
        dmuon.Muon(model.parameters())
    with pytest.raises(ValueError, match="_dedicated_comm_ctx"):
        dmuon.Muon(model)
    mesh = torch.distributed.device_mesh.init_device_mesh(DEVICE, (world_size,))
    dmuon.dedicate_params(model, mesh, projections)
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        dmuon.Muon(model)  # not under fully_shard
    close(model)


def test_bad_arguments_are_named(ranks):
    ranks(1, arguments)


def diverging(rank, world_size):
    """A custom coefficient set that diverges is refused when it is configured."""
    import dmuon

    model = make()
    ns = dmuon.NewtonSchulz(coefficients=[(5.0, -1.0, 4.0)] * 5)
    with pytest.raises(ValueError, match="singular value"):
        dedicate(model, world_size, True, muon={"ns_backend": ns})


def test_diverging_coefficients_are_refused(ranks):
    ranks(2, diverging)
