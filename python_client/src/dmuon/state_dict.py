"""``model.state_dict()`` and ``model.load_state_dict()`` with dedicated parameters: plain, full, in their own dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon.boundary import ancestors
from dmuon.context import DedicatedCommContext, get_comm_ctx
from dmuon.parameter import DedicatedParam


class StateDictHooks:
    """Reads from the daemon's master weights on save, and writes to them on load."""

    def __init__(self, ctx: DedicatedCommContext) -> None:
        self._ctx = ctx
        self._depth = 0  # of the recursion of a load_state_dict that is under way
        self._loaded: list[DedicatedParam] = []
        model = ctx.model
        holders: dict[str, list[tuple[str, DedicatedParam]]] = {}
        names = {id(module): name for name, module in model.named_modules()}
        for p in ctx.params:
            for module, leaf in p.places:
                holders.setdefault(names[id(module)], []).append((leaf, p))
        for path, held in holders.items():
            model.get_submodule(path).register_state_dict_post_hook(self._save_hook(held))
        # On all modules above them too, so that the outermost one sees the end of the load.
        for path in {a for holder in holders for a in ancestors(holder)}:
            module = model.get_submodule(path)
            module.register_load_state_dict_pre_hook(self._before_load(holders.get(path, [])))
            module.register_load_state_dict_post_hook(self._after_load)

    def _save_hook(self, held: list[tuple[str, DedicatedParam]]) -> Any:
        def save(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
            for leaf, p in held:
                if prefix + leaf in state_dict:
                    state_dict[prefix + leaf] = read(self._ctx, p)

        return save

    def _before_load(self, held: list[tuple[str, DedicatedParam]]) -> Any:
        def prepare(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
            if module is self._ctx.model and self._depth:
                self._abandon()
            self._depth += 1
            for leaf, p in held:
                if prefix + leaf in state_dict and p not in self._loaded:
                    # Plain memory for load_state_dict to copy into, in the original dtype: bf16 would lose bits.
                    p.tensor.__class__ = p.cls
                    p.tensor.data = read(self._ctx, p)
                    self._loaded.append(p)

        return prepare

    def _abandon(self) -> None:
        """The last load ended by an exception."""
        for p in self._loaded:
            self._ctx.weights.restore(p)
        self._depth, self._loaded = 0, []

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._loaded:
            loaded, self._loaded = self._loaded, []
            write(self._ctx, {p: p.tensor.detach() for p in loaded})


def read(ctx: DedicatedCommContext, p: DedicatedParam) -> torch.Tensor:
    """A copy of the weights of the last step."""
    if not ctx.reshard_after_forward and p.param_dtype == p.original_dtype == torch.float32:
        ctx.weights.wait()
        master = p.weight.clone()  # an fp32 weight is its own
        ctx.weights.reading()
        return master
    return p.read_master(ctx.session)


def write(ctx: DedicatedCommContext, values: Mapping[DedicatedParam, torch.Tensor]) -> None:
    """Makes `values` the weights, here and in the daemon. Collective; the owner rank's values win."""
    ctx.weights.wait()
    # The daemon writes over everybody's weights at once, so every rank's device must have read the old ones.
    ctx.weights.before_step()
    ctx.barrier()
    for p, value in values.items():
        if p.is_owner:
            p.write_master(ctx.session, value)
    ctx.barrier()  # nobody reads before all are written
    with torch.no_grad():
        for p, value in values.items():
            if not ctx.reshard_after_forward:
                p.weight.copy_(value)
    ctx.weights.refresh()
    for p in values:
        ctx.weights.restore(p)
        p.version = p.tensor._version


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            yield name, value


def get_model_state_dict(
    model: nn.Module, *, cpu_offload: bool = True, rank0_only: bool = True
) -> dict[str, torch.Tensor]:
    """The whole model under plain names as full tensors. Collective.

    With ``rank0_only`` the other ranks get an empty dict. Without ``cpu_offload`` tensors are where the parameters are.
    """
    ctx = get_comm_ctx(model)
    where = {name: p.device for name, p in model.named_parameters(remove_duplicate=False)}
    rank = ctx.rank if ctx is not None else (dist.get_rank() if dist.is_initialized() else 0)
    keep = rank == 0 or not rank0_only
    result: dict[str, torch.Tensor] = {}
    for name, value in _named(model):
        full = value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
        if keep:
            result[name] = full.to("cpu" if cpu_offload else where.get(name, full.device))
    return result


def set_model_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Loads full tensors under plain names, as ``get_model_state_dict`` or a plain model gave them. Collective.

    The ranks other than 0 may pass an empty dict: they get rank 0's tensors. A missing or extra key, or a wrong shape,
    is an error that names it, and nothing is loaded.
    """
    ctx = get_comm_ctx(model)
    group = ctx.group if ctx is not None else (dist.group.WORLD if dist.is_initialized() else None)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    state_dict = _from_rank_0(group, state_dict)
    problems = [f"missing key '{name}'" for name in own if name not in state_dict]
    problems += [f"unexpected key '{name}'" for name in state_dict if name not in own]
    problems += [
        f"'{name}': expected shape {tuple(value.shape)}, got {tuple(state_dict[name].shape)}"
        for name, value in own.items()
        if name in state_dict and value.shape != state_dict[name].shape
    ]
    if problems:
        raise ValueError("set_model_state_dict: " + "; ".join(problems[:8]))
    ready = {
        name: distribute_tensor(state_dict[name].to(value.device, value.dtype), value.device_mesh, value.placements)
        if isinstance(value, DTensor)
        else state_dict[name]
        for name, value in own.items()
    }
    model.load_state_dict(ready, strict=False)


def _from_rank_0(
    group: dist.ProcessGroup | None, state_dict: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The given dict, or on ranks without one that of rank 0."""
    if group is None or dist.get_world_size(group) == 1:
        return state_dict
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, len(state_dict) > 0, group=group)
    if all(given) or not given[0]:
        return state_dict
    names = [list(state_dict)]
    dist.broadcast_object_list(names, group=group, group_src=0)
    received: dict[str, torch.Tensor] = {}
    for name in names[0]:
        # As an object: NCCL moves no tensor that is on the CPU. One by one: it makes copies.
        box: list[Any] = [state_dict[name].detach().cpu().clone() if dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(box, group=group, group_src=0)
        received[name] = box[0]
    return received
