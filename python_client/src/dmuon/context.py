"""What dmuon knows about one model: its parameters, its boundaries and its session."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from dmuon import gloo_threads
from dmuon.parameter import Boundary, DedicatedParam

ATTRIBUTE = "_dedicated_comm_ctx"
_live: weakref.WeakSet[DedicatedCommContext] = weakref.WeakSet()


class DedicatedCommContext:
    """The session of a model, as one rank sees it. Made by ``dedicate_params``; held by the model."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        params: list[DedicatedParam],
        boundaries: list[Boundary],
        reshard_after_forward: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.params = params
        self.boundaries = boundaries
        self.reshard_after_forward = reshard_after_forward
        self.compute_dtype: Any = None
        self.session: Any = None  # _native.Session; None when no parameter is dedicated
        self.job = ""
        self.adopted = False
        self.sync_depth = 0  # no_sync contexts that are open
        self.gradients: Any = None  # GradientCollector, from adoption on
        self.weights: Any = None  # ResidentWeights or WeightWindows, from adoption on
        self.arena_check: Any = None  # ArenaCheck, from adoption on
        self._pid = os.getpid()
        _live.add(self)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this dmuon session is gone")
        return model

    @property
    def syncing(self) -> bool:
        return self.sync_depth == 0

    def barrier(self) -> None:
        """All ranks meet."""
        if self.group is not None and self.world_size > 1:
            dist.all_gather_object([None] * self.world_size, None, group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank. Collective."""
        if self.group is None or self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Leaves the session. Idempotent; the model keeps the weights that it has."""
        if self.session is not None and os.getpid() == self._pid:
            self.session.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(
            "a model with dedicated parameters cannot be copied: its weights live in memory shared with dmuond. "
            "Copy it before dedicate_params, or load its state_dict() into a fresh model"
        )

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "a model with dedicated parameters cannot be pickled: save model.state_dict(), not the model"
        )


def get_comm_ctx(model: nn.Module) -> DedicatedCommContext | None:
    """The context of a model, or None when ``dedicate_params`` was not called on it."""
    return model.__dict__.get(ATTRIBUTE)


def require_ctx(model: nn.Module) -> DedicatedCommContext:
    ctx = get_comm_ctx(model)
    if ctx is None:
        raise ValueError(f"Model has no {ATTRIBUTE}: call dmuon.dedicate_params(model, mesh, predicate) first")
    return ctx


@atexit.register
def _close_all() -> None:
    """So that the daemon sees trainers leave and not die, and the last collective does not abort the process."""
    for ctx in list(_live):
        with contextlib.suppress(Exception):
            ctx.close()
    gloo_threads.wait_idle()
