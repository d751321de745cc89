"""``dedicate_params``: which parameters the daemon updates, and who owns each."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuon import _torch_private, endpoint, fsdp_patch, job
from dmuon.boundary import BoundaryRule, contains
from dmuon.context import ATTRIBUTE, DedicatedCommContext, get_comm_ctx
from dmuon.parameter import Boundary, DedicatedParam
from dmuon.policy import check_route, parse_dtype

_log = logging.getLogger("dmuon")

Predicate = Callable[[str, nn.Parameter], bool]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate,
    compute_dtype: torch.dtype | str | None = None,
    reshard_after_forward: bool = True,
    replicate_mesh: DeviceMesh | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    hook_boundary_resolver: Callable[[str, nn.Parameter], nn.Module | None] | None = None,
    assignment_group_key_fn: Callable[[str, nn.Parameter], Any] | None = None,
    route_hint_fn: Callable[[str, nn.Parameter], str | None] | None = None,
    max_owners_per_group: int | None = None,
    owner_strategy: str | None = None,
    owner_cost_model: str | None = None,
    hsdp_column_balance: bool | None = None,
    pack_small_params: bool | None = None,
    tp_buffer_reuse: bool | str = False,
    replicate_broadcast_bucket_mb: float = 0.0,
    muon_forward_unshard: str = "broadcast",
    delay_stage2_to_optimizer: bool = True,
    param_policy: dict[str, Any] | None = None,
    param_policy_fn: Callable[[str, nn.Parameter], Any] | None = None,
    process_group_policy: str | None = None,
    *,
    blocks_fn: Callable[[str, nn.Parameter], Any] | None = None,
) -> dict[nn.Parameter, int]:
    """Dedicates the parameters for which ``predicate(full_name, parameter)`` is true to the Muon daemon.

    Opens the job's session (collective over ``mesh``), and returns parameter -> owner rank. Call it once, before
    ``fully_shard``, which then skips these parameters. They stay ordinary tensors, to be initialised, loaded or moved,
    until ``dmuon.Muon(model, ...)`` adopts them.

    Args:
        mesh: the data-parallel ranks, one-dimensional.
        compute_dtype: dtype of the weights in forward; default: what ``fully_shard`` uses around them.
        reshard_after_forward: True: weights are in memory only while their boundary runs. False: always.
        hook_boundary_predicate: a parameter's boundary is the lowest module above it for which this is true; default
            ``layers.N`` and ``blocks.N``, else the whole model. With ``hook_boundary_strict=False`` a parameter without
            one falls back to its own module.
        hook_boundary_resolver: names the boundary module of a parameter directly.
        route_hint_fn: "muon" (or None) or "adamw" for a parameter.
        process_group_policy: "isolated" or "shared"; the daemon's communicators are its own in either case.
        tp_buffer_reuse, replicate_broadcast_bucket_mb, delay_stage2_to_optimizer, hsdp_column_balance: without effect
            here; they tune a Muon that runs inside the trainer.

    Raises:
        ValueError: a parameter cannot be dedicated, or the ranks do not select the same ones.
        DaemonUnavailable: no daemon, and none could be started.
    """
    _refuse_unbuilt(
        replicate_mesh=replicate_mesh,
        assignment_group_key_fn=assignment_group_key_fn,
        max_owners_per_group=max_owners_per_group,
        owner_strategy=owner_strategy if owner_strategy != "lpt" else None,
        owner_cost_model=owner_cost_model if owner_cost_model != "optimizer" else None,
        pack_small_params=pack_small_params if pack_small_params is not True else None,
        muon_forward_unshard=muon_forward_unshard if muon_forward_unshard != "broadcast" else None,
        param_policy=param_policy,
        param_policy_fn=param_policy_fn,
        blocks_fn=blocks_fn,
    )
    if process_group_policy not in (None, "isolated", "shared"):
        raise ValueError(f"process_group_policy: expected 'isolated' or 'shared', got '{process_group_policy}'")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; a (replicate, shard) grid is not built yet")
    if get_comm_ctx(model) is not None:
        raise ValueError("dedicate_params was already called on this model")
    fsdp_patch.check_patch()
    _torch_private.check_autograd()

    group = mesh.get_group() if mesh.size() > 1 or dist.is_initialized() else None
    rule = BoundaryRule(model, hook_boundary_predicate, hook_boundary_strict, hook_boundary_resolver)
    error: Exception | None = None
    params: list[DedicatedParam] = []
    boundaries: list[Boundary] = []
    try:
        params, boundaries = _build_table(model, predicate, rule, route_hint_fn)
    except Exception as e:  # told to the other ranks, which would wait for this one
        error = e
    ctx = DedicatedCommContext(model, group, params, boundaries, reshard_after_forward)
    ctx.compute_dtype = parse_dtype(compute_dtype, "compute_dtype")
    _agree(ctx, error)
    if not params:
        _log.warning("dedicate_params: no parameters matched the predicate")
        model.__dict__[ATTRIBUTE] = ctx
        return {}

    _open_session(ctx)
    model.__dict__[ATTRIBUTE] = ctx
    for p in params:
        for module, leaf in p.places:
            fsdp_patch.mark(module, leaf)
    return {p.tensor: p.owner_rank for p in params}


def _refuse_unbuilt(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"dedicate_params({name}=...) is not built yet")


def _build_table(
    model: nn.Module,
    predicate: Predicate,
    rule: BoundaryRule,
    route_hint_fn: Callable[[str, nn.Parameter], str | None] | None,
) -> tuple[list[DedicatedParam], list[Boundary]]:
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    params: list[DedicatedParam] = []
    by_boundary: dict[str, Boundary] = {}
    for parameter in model.parameters():
        names = names_of[id(parameter)]
        selected = [name for name in names if predicate(name, parameter)]
        if not selected:
            continue
        if len(selected) > 1:
            raise ValueError(
                f"parameter '{selected[0]}' is shared with '{selected[1]}' and the predicate selects both names; let "
                "it select one of them"
            )
        name = selected[0]
        _check(name, parameter)
        route = check_route((route_hint_fn and route_hint_fn(name, parameter)) or "muon", name)
        if route == "muon" and parameter.ndim < 2:
            raise ValueError(
                f"parameter '{name}' of shape {tuple(parameter.shape)} is on the route 'muon', which needs two "
                "dimensions or more; narrow the predicate (p.ndim >= 2) or give it the route 'adamw'"
            )
        # The selected name first; then the other places that hold the same tensor.
        holders = [name.rpartition(".")[0], *(n.rpartition(".")[0] for n in names if n != name)]
        leaves = [name.rpartition(".")[2], *(n.rpartition(".")[2] for n in names if n != name)]
        where = rule.of(name, parameter, holders)
        boundary = by_boundary.get(where)
        if boundary is None:
            boundary = by_boundary[where] = Boundary(len(by_boundary), where, modules[where], exclusive=False)
        places = list(dict.fromkeys((modules[h], leaf) for h, leaf in zip(holders, leaves, strict=True)))
        p = DedicatedParam(len(params), name, parameter, places, route, boundary)
        boundary.params.append(p)
        params.append(p)
    for boundary in by_boundary.values():
        boundary.exclusive = boundary.name == "" or any(contains(boundary.name, other) for other in by_boundary)
    return params, list(by_boundary.values())


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter '{name}' is already a DTensor: call dedicate_params before fully_shard (tensor parallelism is "
            "not built yet)"
        )
    if not parameter.is_floating_point():
        raise ValueError(f"parameter '{name}' is {parameter.dtype}; only floating point parameters can be dedicated")


def _agree(ctx: DedicatedCommContext, error: Exception | None) -> None:
    """The ranks compare what they are about to open, so that a difference is an error and not a wait. Collective."""
    rows = [
        (p.param_name, tuple(p.shape), p.route, p.boundary.name, ctx.reshard_after_forward) for p in ctx.params
    ]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    everyone = ctx.gather((None if error is None else f"{type(error).__name__}: {error}", len(rows), digest))
    if error is not None:
        raise error
    for rank, (failure, _, _) in enumerate(everyone):
        if failure is not None:
            raise RuntimeError(f"dedicate_params failed on rank {rank}: {failure}")
    if len({(count, d) for _, count, d in everyone}) == 1:
        return
    tables = ctx.gather(rows)
    first = next(r for r in range(ctx.world_size) if everyone[r][1:] != everyone[0][1:])
    names = [{row[0] for row in tables[r]} for r in (0, first)]
    only = sorted(names[0] ^ names[1])
    if only:
        where = 0 if only[0] in names[0] else first
        what = f"parameter '{only[0]}' is selected on rank {where} only"
    else:
        a, b = next((a, b) for a, b in zip(tables[0], tables[first], strict=True) if a != b)
        what = f"parameter '{a[0]}' is {a[1:]} on rank 0 and {b[1:] if a[0] == b[0] else b} on rank {first}"
    counts = ", ".join(f"rank {r}: {count}" for r, (_, count, _) in enumerate(everyone))
    raise ValueError(
        f"dedicate_params: the ranks do not select the same parameters ({counts}); first difference between ranks "
        f"0 and {first}: {what}"
    )


def _open_session(ctx: DedicatedCommContext) -> None:
    from dmuon import _native

    connection = endpoint.connect(ctx.group)
    ctx.job = job.agree_on_name(ctx.group)
    ctx.session = connection.open_session(
        _native.OpenOptions(
            job=ctx.job,
            rank=ctx.rank,
            mesh=_native.Mesh(shard=ctx.world_size),
            reshard_after_forward=ctx.reshard_after_forward,
            boundaries=[_native.Boundary(b.name, b.exclusive) for b in ctx.boundaries],
            parameters=[
                _native.Parameter(p.param_name, p.shape, getattr(_native.Route, p.route.upper()), p.boundary.index)
                for p in ctx.params
            ],
            restart_count=job.restart_count(),
        )
    )
    placement = ctx.session.placement
    for p, entry in zip(ctx.params, placement.parameters, strict=True):
        p.owner_rank = entry.owner
        p.is_owner = entry.owner == ctx.rank
        p.tensor._dedicated_owner_rank = entry.owner  # type: ignore[attr-defined]
    if ctx.rank == 0:
        _log.info(
            "dedicate_params: %d params assigned to %d ranks, imbalance=%.1f%%, loads=[%s] (job '%s', dmuond %s at %s)",
            len(ctx.params), ctx.world_size, (placement.imbalance - 1) * 100,
            ", ".join(f"{load:.3g}" for load in placement.loads),
            ctx.job, connection.daemon_version, connection.endpoint,
        )


def get_dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """All dedicated parameters of a model, in the order of ``model.named_parameters()``."""
    ctx = get_comm_ctx(model)
    return list(ctx.params) if ctx is not None else []


def get_owned_params(model: nn.Module, rank: int | tuple[int, int]) -> list[DedicatedParam]:
    """Those that a rank owns; ``rank`` is an int, or (shard, replicate)."""
    if isinstance(rank, tuple):
        if len(rank) != 2 or any(isinstance(r, bool) or not isinstance(r, int) for r in rank):
            raise TypeError(f"rank: expected an int or (shard, replicate), got {rank!r}")
        shard, replicate = rank
    elif isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank: expected an int or (shard, replicate), got {rank!r}")
    else:
        shard, replicate = rank, 0
    if shard < 0 or replicate < 0:
        raise ValueError(f"rank: expected no negative rank, got {rank!r}")
    return [p for p in get_dedicated_params(model) if p.owner_rank == shard and replicate == 0]
