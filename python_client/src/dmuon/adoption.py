"""Takes the dedicated parameters of a model into the arenas: from then on the daemon owns their values."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import torch
from torch import nn

from dmuon import _torch_private, device
from dmuon.arena_check import ArenaCheck
from dmuon.boundary import ancestors
from dmuon.context import DedicatedCommContext
from dmuon.gradients import GradientCollector
from dmuon.parameter import DedicatedParam
from dmuon.resident import ResidentWeights
from dmuon.state_dict import StateDictHooks
from dmuon.windows import WeightWindows

_log = logging.getLogger("dmuon")

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def native_dtype(dtype: torch.dtype, name: str) -> Any:
    from dmuon import _native

    if dtype not in _DTYPES:
        raise ValueError(f"parameter '{name}' is {dtype}; dmuon publishes float32, bfloat16 or float16")
    return getattr(_native.Dtype, _DTYPES[dtype])


def find_tensors(ctx: DedicatedCommContext) -> None:
    """Looks the Parameter objects up again (``to_empty`` makes new ones) and settles their dtypes."""
    model = ctx.model
    names = {id(module): name for name, module in model.named_modules()}
    for p in ctx.params:
        tensor = p.current()
        module, _ = p.places[0]
        if tensor is None or id(module) not in names:
            raise RuntimeError(f"parameter '{p.param_name}' is no longer in the model of dedicate_params")
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            raise RuntimeError(
                f"parameter '{p.param_name}' was sharded by fully_shard though it is dedicated: its module was replaced"
                " or pickled after dedicate_params"
            )
        if tensor.is_meta:
            raise RuntimeError(f"parameter '{p.param_name}' is on the meta device: initialise it before dmuon.Muon")
        if tensor.shape != p.shape:
            raise RuntimeError(
                f"parameter '{p.param_name}' had shape {tuple(p.shape)} at dedicate_params and now has "
                f"{tuple(tensor.shape)}"
            )
        for other, other_leaf in p.places[1:]:
            if other._parameters.get(other_leaf) is not tensor:
                raise RuntimeError(f"parameter '{p.param_name}' was tied at dedicate_params and no longer is")
        p.tensor, p.cls, p.original_dtype = tensor, type(tensor), tensor.dtype
        p.param_dtype = ctx.compute_dtype or _fsdp_dtype(model, names[id(module)]) or tensor.dtype


def _fsdp_dtype(model: nn.Module, path: str) -> torch.dtype | None:
    """Of the nearest module above that is under fully_shard: nobody else casts dedicated parameters."""
    for ancestor in ancestors(path):
        dtype = _torch_private.fsdp_param_dtype(model.get_submodule(ancestor))
        if dtype is not None:
            return dtype
    return None


def _warn_if_ranks_differ(ctx: DedicatedCommContext) -> None:
    if ctx.world_size == 1:
        return
    sums = []
    for p in ctx.params:
        flat = p.tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        sums.append(zlib.crc32(flat.numpy().data))
    everyone = ctx.gather(sums)
    for p in ctx.params:
        if any(row[p.index] != everyone[p.owner_rank][p.index] for row in everyone):
            if ctx.rank == 0:
                _log.warning(
                    "the ranks start from different values, first in parameter '%s': the values of its owner, rank %d, "
                    "are taken", p.param_name, p.owner_rank,
                )
            return


def adopt(ctx: DedicatedCommContext) -> None:
    """REQUIRES: the session is configured. Collective: all ranks have the owner's values after it."""
    session = ctx.session
    _warn_if_ranks_differ(ctx)
    for boundary in ctx.boundaries:
        boundary.window = session.window(boundary.index)
    for p in ctx.params:
        p.weight = _view(session.weight, p, p.param_dtype)
        p.grad = _view(session.grad, p, p.grad_dtype)
        if p.is_owner:
            p.write_master(session, p.tensor)
    with device.current(session):
        session.start()
    with torch.no_grad():
        ctx.weights = WeightWindows(ctx) if ctx.reshard_after_forward else ResidentWeights(ctx)
        # Before the hooks of the weights, so that a moved parameter is found before anything waits for it.
        ctx.gradients = GradientCollector(ctx)
        ctx.weights.adopt()
        ctx.arena_check = ArenaCheck(ctx)
        StateDictHooks(ctx)
    ctx.adopted = True


def _view(arena: Any, p: DedicatedParam, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.utils.dlpack.from_dlpack(arena(p.index, p.numel * dtype.itemsize))
    return flat.view(dtype).view(p.shape)
