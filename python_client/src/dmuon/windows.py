"""Z3 (``reshard_after_forward=True``): weights are in memory only while their boundary runs.

Each boundary has one window of the WEIGHT arena, always the same, and shares it with others. Autograd saved *views* of
that window in forward, so a boundary must be back in it before its backward begins: a hook on its output tensors does
that. Nothing is given back before another boundary needs the window ("release" only permits), and every boundary after
a step, because what it holds is old then. On a GPU a release waits for what the device had to do when the boundary was
done, not for what it got since, so that it need not run dry.

Is a boundary still needed by the backward pass that runs? Autograd runs nodes in falling order of their sequence
numbers, so a boundary whose backward began and whose forward began at number s is needed until a node below s runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dmuon import _torch_private, device
from dmuon.context import DedicatedCommContext
from dmuon.outputs import graph_tensors
from dmuon.parameter import Boundary, DedicatedParam
from dmuon.released import ReleasedParameter


class WeightWindows:
    """Materialises boundaries and releases them."""

    def __init__(self, ctx: DedicatedCommContext) -> None:
        self._ctx = ctx
        self._session = ctx.session
        self._holder: dict[int, Boundary] = {}
        where = ctx.params[0].tensor.device  # which a released parameter still names
        self._nan = {
            dtype: torch.full((), float("nan"), dtype=dtype, device=where)
            for dtype in {p.param_dtype for p in ctx.params}
        }
        aside = device.stream_aside(ctx.session)
        self._readers = [device.Streams(ctx.session, aside) for _ in ctx.boundaries]
        self.materialized = 0  # times that a window was filled

    def adopt(self) -> None:
        """Takes the parameters out of memory and installs the hooks."""
        for p in self._ctx.params:
            p.tensor.__dict__["_dmuon_param"] = p
            self.restore(p)
        for boundary in self._ctx.boundaries:
            before, after = self._hooks_for(boundary)
            boundary.module.register_forward_pre_hook(before)
            boundary.module.register_forward_hook(after, always_call=True)

    def restore(self, p: DedicatedParam) -> None:
        if p.boundary.resident:
            p.tensor.__class__ = p.cls
            p.tensor.data = p.weight
        else:
            p.tensor.data = self._nan[p.param_dtype].expand(p.shape)
            p.tensor.__class__ = ReleasedParameter

    def _hooks_for(self, boundary: Boundary) -> tuple[Any, Any]:
        def before(module: Any, args: Any) -> None:
            self._begin_forward(boundary)

        def after(module: Any, args: Any, output: Any) -> None:
            self._end_forward(boundary, output)

        return _torch_private.without_dynamo(before), _torch_private.without_dynamo(after)

    def _begin_forward(self, boundary: Boundary) -> None:
        device.refuse_capture(self._session)
        self._end_readers()
        displaced = None
        if not boundary.resident:
            holder = self._holder.get(boundary.window)
            if holder is not None and holder.running:
                raise RuntimeError(
                    f"boundaries '{holder.name}' and '{boundary.name}' share a window and one runs inside the other, "
                    "though it is not a submodule of it: choose boundaries by hook_boundary_predicate so that a "
                    "boundary is called only by modules above it, or use reshard_after_forward=False"
                )
            if holder is not None and self._busy(holder):
                displaced = holder  # a recomputation, which may use any boundary of its region: put back after it
            self._materialize(boundary)
        self._readers[boundary.index].here()
        boundary.running += 1
        boundary.displaced.append(displaced)
        boundary.starts.append(_torch_private.next_sequence_nr())

    def _end_forward(self, boundary: Boundary, output: Any) -> None:
        if not boundary.starts:
            return  # _begin_forward raised
        start = boundary.starts.pop()
        displaced = boundary.displaced.pop()
        boundary.running -= 1
        self._readers[boundary.index].here()
        self._end_readers()
        tensors = graph_tensors(output)
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(
                tensors, functools.partial(self._begin_backward, boundary, start), mode="any"
            )
        if displaced is not None:
            self._materialize(displaced)
            self._readers[displaced.index].here()

    @_torch_private.without_dynamo
    def _begin_backward(self, boundary: Boundary, start: int, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True needs the weights of boundary '{boundary.name}' after its backward; dedicate with "
                "reshard_after_forward=False for higher derivatives"
            )
        self._end_readers()
        if not boundary.resident:
            holder = self._holder.get(boundary.window)
            if holder is not None and (holder.running or self._busy(holder)):
                raise RuntimeError(
                    f"boundaries '{holder.name}' and '{boundary.name}' share a window, and the backward of one began "
                    "inside that of the other: choose boundaries by hook_boundary_predicate so that a boundary is "
                    "called only by modules above it, or use reshard_after_forward=False"
                )
            self._materialize(boundary)
        self._readers[boundary.index].here()
        boundary.backwards.append((_torch_private.current_graph_task_id(), start))

    def _busy(self, boundary: Boundary) -> bool:
        """The backward pass that runs now is inside this boundary."""
        task = _torch_private.current_graph_task_id()
        if task == -1 or not boundary.backwards:
            return False
        number = _torch_private.current_node_sequence_nr()
        boundary.backwards = [(t, start) for t, start in boundary.backwards if t != task or number >= start]
        return any(t == task for t, _ in boundary.backwards)

    def _end_readers(self) -> None:
        """Nothing that is yet to come reads the boundaries that are done: their windows need not wait for it."""
        for boundary in self._holder.values():
            if not boundary.running and not self._busy(boundary):
                self._readers[boundary.index].end()

    def _materialize(self, boundary: Boundary) -> None:
        holder = self._holder.get(boundary.window)
        if holder is not None and holder is not boundary:
            self._evict(holder)
        self._session.materialize(boundary.index)
        self.materialized += 1
        self._holder[boundary.window] = boundary
        boundary.resident = True
        for p in boundary.params:
            p.tensor.__class__ = p.cls
            p.tensor.data = p.weight

    def _evict(self, boundary: Boundary) -> None:
        boundary.resident = False
        self._holder.pop(boundary.window, None)
        for p in boundary.params:
            self.restore(p)
        with device.current(self._session):
            self._session.release(boundary.index, self._readers[boundary.index].join())

    def before_step(self) -> None:
        """Nothing: only a window that was released is written."""

    def after_step(self) -> None:
        """Fails graphs that still need the old weights, and releases all."""
        torch.autograd.graph.increment_version([p.tensor for p in self._ctx.params])
        for boundary in self._ctx.boundaries:
            boundary.backwards.clear()
        self.refresh()

    def refresh(self) -> None:
        """What the windows hold is old."""
        for boundary in self._ctx.boundaries:
            if boundary.resident:
                self._evict(boundary)

    def wait(self) -> None:
        """Nothing to wait for: a window is filled with the last step's weights when a boundary asks for them."""

    def check_backward(self, p: DedicatedParam) -> None:
        """A gradient of p was just computed: its weights must have been here."""
        if not p.boundary.resident:
            raise RuntimeError(
                f"the backward of parameter '{p.param_name}' ran without its weights: the gradient did not come "
                f"through the outputs of boundary '{p.boundary.name}' (something computed inside it was kept on the "
                "side). Return it from the boundary's forward, or dedicate with reshard_after_forward=False"
            )
        self._readers[p.boundary.index].here()

    def address(self, p: DedicatedParam) -> int | None:
        """Where the parameter must point; None when it is not in memory."""
        return p.weight.data_ptr() if p.boundary.resident else None
