"""Gradient accumulation, and waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dmuon.context import get_comm_ctx, require_ctx


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside do not complete a batch: the next one outside does, and is stepped as one with them.

    Nothing is communicated inside, except that with ``reshard_after_forward=True`` the dedicated gradients go to their
    owners at once, where they are summed. May be nested.
    """
    ctx = get_comm_ctx(model)
    if ctx is not None:
        ctx.sync_depth += 1
    outermost = ctx is None or ctx.sync_depth == 1
    if outermost and isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if ctx is not None:
            ctx.sync_depth -= 1
        if outermost and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)


def broadcast_all_updates(model: nn.Module) -> None:
    """Returns once the weights of the last step are here."""
    ctx = require_ctx(model)
    if ctx.weights is not None:
        ctx.weights.wait()


def broadcast_all_updates_async(model: nn.Module) -> None:
    """Nothing to start: ``step`` began the publication."""
    require_ctx(model)


def wait_all_replicate_broadcasts(model: nn.Module) -> None:
    """Returns once the weights of the last step are here. For code that reads weights outside of forward."""
    broadcast_all_updates(model)


def wait_all_post_step_broadcasts(model: nn.Module) -> None:
    """The same under another name."""
    broadcast_all_updates(model)
