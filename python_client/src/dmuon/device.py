"""Where the arenas are: in the host's memory, or on this process's GPU when the daemon computes on GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dmuon.context import DedicatedCommContext


def for_arenas(ctx: DedicatedCommContext) -> AbstractContextManager[Any]:
    """Makes the parameters' device the current one, where the client allocates. ValueError: they are elsewhere."""
    on_gpu = ctx.session.arenas_on_device
    first = ctx.params[0]
    for p in ctx.params:
        if p.tensor.device.type != ("cuda" if on_gpu else "cpu"):
            where = "on GPUs: move the model to one before Muon(...)" if on_gpu else "on the CPU: leave the model there"
            other = "cpu" if on_gpu else "cuda"
            raise ValueError(
                f"parameter '{p.param_name}' is on {p.tensor.device}, and the daemon computes {where}, or use a daemon "
                f"with backend '{other}'"
            )
        if p.tensor.device != first.tensor.device:
            raise ValueError(
                f"parameters '{first.param_name}' and '{p.param_name}' are on {first.tensor.device} and "
                f"{p.tensor.device}: expected one device a rank"
            )
    return torch.cuda.device(first.tensor.device) if on_gpu else nullcontext()


def stream(session: Any) -> int | None:
    """The current stream of the arenas' device, for what must come after the work on it; None in the host's memory."""
    if session.device is None:
        return None
    return int(torch.cuda.current_stream(session.device).cuda_stream)
