"""AdamW on this rank's FSDP2 shards: torch's own, run on the local tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def any_nonfinite(params: Iterable[nn.Parameter]) -> bool:
    """Whether a gradient of this rank's shards holds inf or NaN."""
    grads = [_local(p.grad) for p in params if p.grad is not None]
    grads = [g for g in grads if g.numel() > 0]
    if not grads:
        return False
    # Largest magnitudes: an inf or NaN comes through, and nothing finite overflows.
    norms = torch._foreach_norm(grads, math.inf)
    return not bool(torch.stack([n.to(torch.float64) for n in norms]).isfinite().all())


@torch.no_grad()
def step(
    params: Iterable[nn.Parameter], group: dict[str, Any], state: MutableMapping[torch.Tensor, dict[str, Any]]
) -> None:
    """One AdamW step of the parameters that have a gradient."""
    tensors: list[list[torch.Tensor]] = [[], [], [], [], []]
    for p in params:
        if p.grad is None:
            continue
        s = state[p]
        if not s:
            s["step"] = torch.tensor(0.0)
            s["exp_avg"] = torch.zeros_like(p)
            s["exp_avg_sq"] = torch.zeros_like(p)
        for column, tensor in zip(tensors, (p, p.grad, s["exp_avg"], s["exp_avg_sq"], s["step"]), strict=True):
            column.append(_local(tensor))
    if not tensors[0]:
        return
    beta1, beta2 = group["betas"]
    adamw(
        tensors[0], tensors[1], tensors[2], tensors[3], [], tensors[4],
        amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=False,
    )  # fmt: skip
