"""The tensors in a module's output, whatever container they come in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def _collect(value: Any, found: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth == 0 or isinstance(value, str | bytes | int | float | None):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _collect(item, found, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            _collect(getattr(value, f.name, None), found, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        for item in vars(value).values():
            _collect(item, found, depth - 1)


def graph_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in `output` that autograd goes through, with the bases of views, each once.

    The base too, because a view that is changed in place moves its gradient to it. Leaves are left out: nothing that
    this module computed stands behind them.
    """
    found: list[torch.Tensor] = []
    _collect(output, found, 8)
    unique: dict[int, torch.Tensor] = {}
    for tensor in found:
        for t in (tensor, tensor._base):
            if t is not None and t.requires_grad and t.grad_fn is not None:
                unique[id(t)] = t
    return list(unique.values())
