"""Every private name of PyTorch that dmuon relies on, each with a check and a clear error."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn


class MissingInTorch(RuntimeError):
    """This PyTorch has moved a private name that dmuon needs."""

    def __init__(self, name: str, need: str) -> None:
        super().__init__(
            f"dmuon needs '{name}' of PyTorch {need}, and this PyTorch {torch.__version__} does not have it; "
            "dmuon is tested with torch 2.15"
        )


def _lookup(path: str, need: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise MissingInTorch(path, need) from None


def managed_states_site() -> tuple[ModuleType, str]:
    """The module where ``fully_shard`` resolves ``_get_managed_states``, and that name."""
    name = "_get_managed_states"
    sites = ("torch.distributed.fsdp._fully_shard._fsdp_init", "torch.distributed.fsdp._fully_shard._fully_shard")
    found = None
    for site in sites:
        try:
            module = importlib.import_module(site)
        except ImportError:
            continue
        if hasattr(module, name):
            found = module  # the last one: older versions import the name into the caller
    if found is None:
        raise MissingInTorch(f"{sites[0]}.{name}", "to keep dedicated parameters out of fully_shard")
    return found, name


def fsdp_param_dtype(module: nn.Module) -> torch.dtype | None:
    """``param_dtype`` of the mixed precision policy that ``fully_shard`` put on this very module."""
    get_state = _lookup(
        "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state", "to read the dtype of fully_shard"
    )
    state = get_state(module)
    if state is None:
        return None
    policy = getattr(state, "_mp_policy", None)
    if policy is None:
        raise MissingInTorch("FSDPState._mp_policy", "to read the dtype of fully_shard")
    return policy.param_dtype


def current_graph_task_id() -> int:
    """The backward pass that runs in this thread; -1 when none does."""
    return torch._C._current_graph_task_id()


def current_node_sequence_nr() -> int:
    """The sequence number of the autograd node that is being run. REQUIRES: a backward runs in this thread."""
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else 0


def next_sequence_nr() -> int:
    """The sequence number that the next autograd node of this thread gets."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def queue_callback(callback: Callable[[], None]) -> None:
    """Runs ``callback`` at the end of the current backward pass. Public from torch 2.15 on."""
    public = getattr(torch.autograd.graph, "queue_callback", None)
    if public is not None:
        public(callback)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(callback)


def check_autograd() -> None:
    """Raises MissingInTorch when the names above that hooks use are not there."""
    for owner, name in (
        (torch._C, "_current_graph_task_id"),
        (torch._C, "_current_autograd_node"),
        (torch.autograd, "_get_sequence_nr"),
        (torch.autograd.graph, "increment_version"),
        (torch.autograd.graph, "register_multi_grad_hook"),
    ):
        if not hasattr(owner, name):
            raise MissingInTorch(f"{owner.__name__}.{name}", "for its backward hooks")


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hides a hook from torch.compile, which would break the graph at each of its steps."""
    return torch._dynamo.disable(function)
