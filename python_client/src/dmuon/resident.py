"""Z2 (``reshard_after_forward=False``): weights stay in the WEIGHT arena; forward waits for the last publication."""

from __future__ import annotations

from typing import Any

import torch

from dmuon import _torch_private, device
from dmuon.context import DedicatedCommContext
from dmuon.parameter import Boundary, DedicatedParam


class ResidentWeights:
    """Waits for each boundary's weights before its forward."""

    def __init__(self, ctx: DedicatedCommContext) -> None:
        self._ctx = ctx
        self._session = ctx.session
        self._readers = device.Streams(ctx.session)

    def adopt(self) -> None:
        """Points the parameters into the arena and installs the hooks."""
        for p in self._ctx.params:
            self.restore(p)
        for boundary in self._ctx.boundaries:
            boundary.module.register_forward_pre_hook(self._hook_for(boundary))

    def restore(self, p: DedicatedParam) -> None:
        p.tensor.data = p.weight

    def _hook_for(self, boundary: Boundary) -> Any:
        def wait(module: Any, args: Any) -> None:
            device.refuse_capture(self._session)
            self._readers.here()
            if not boundary.fresh:
                self._session.wait_weights(boundary.index)
                boundary.fresh = True

        return _torch_private.without_dynamo(wait)

    def reading(self) -> None:
        """The current stream reads weights outside of their boundaries."""
        self._readers.here()

    def before_step(self) -> None:
        """The daemon writes over the weights as soon as the ranks agree on the step: nothing may read the old ones."""
        self._readers.synchronize()

    def after_step(self) -> None:
        """New weights are on their way: forget that the old ones are here, and fail graphs that still need them."""
        for boundary in self._ctx.boundaries:
            boundary.fresh = False
        torch.autograd.graph.increment_version([p.tensor for p in self._ctx.params])

    def refresh(self) -> None:
        """The weights were written from outside: nothing to do, they are in the arena."""

    def wait(self) -> None:
        """All weights of the last step are here."""
        self._session.wait_all_weights()
        for boundary in self._ctx.boundaries:
            boundary.fresh = True

    def check_backward(self, p: DedicatedParam) -> None:
        """A gradient of p was just computed, from weights that are always here."""
        self._readers.here()

    def address(self, p: DedicatedParam) -> int | None:
        """Where the parameter must point; None when it is not in memory."""
        return p.weight.data_ptr()
