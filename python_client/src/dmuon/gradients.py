"""From ``p.grad`` into the GRAD arena, boundary by boundary.

Correct without any hint about where a backward pass ends: whatever the hooks brought is in the arena, and ``flush``
sends it. The hints (all parameters of a boundary arrived; the engine's end-of-backward callback) only make it early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from dmuon import _torch_private, device
from dmuon.context import DedicatedCommContext
from dmuon.outputs import graph_tensors
from dmuon.parameter import Boundary, DedicatedParam


class GradientCollector:
    """The gradients of one generation, that is, since the last step or zero_grad."""

    def __init__(self, ctx: DedicatedCommContext) -> None:
        self._ctx = ctx
        self._session = ctx.session
        # Z3: micro-batches under no_sync are sent one by one, so that memory does not grow.
        self._send_each = ctx.reshard_after_forward
        self._holder: dict[int, Boundary] = {}  # Z3: whose gradients lie in a window
        self._callback_task = -1
        self._unfinished = False  # gradients of a synchronised backward pass that did not see its end
        self._streams = [device.Streams(ctx.session) for _ in ctx.boundaries]  # that wrote its place in GRAD
        self.sent = False  # something of this generation is with the daemon
        for boundary in ctx.boundaries:
            boundary.count_expected()
        for p in ctx.params:
            self.hook(p)
        root_hook = _torch_private.without_dynamo(self._after_root_forward)
        ctx.model.register_forward_hook(root_hook)

    def hook(self, p: DedicatedParam) -> None:
        """Collects this parameter's gradients from now on, if it is trainable."""
        if p.hooked or not p.tensor.requires_grad:
            return
        p.hooked = True
        p.tensor.register_post_accumulate_grad_hook(self._hook_for(p))

    def _hook_for(self, p: DedicatedParam) -> Callable[[torch.Tensor], None]:
        # Weak, because Python's garbage collector does not see the tensor's own reference to this hook: a cycle through
        # it would keep the model for ever.
        weak_self, index = weakref.ref(self), p.index

        def take(tensor: torch.Tensor) -> None:
            collector = weak_self()
            if collector is not None and tensor.grad is not None:
                p = collector._ctx.params[index]
                collector._ctx.weights.check_backward(p)
                collector.take(p)

        return _torch_private.without_dynamo(take)

    def take(self, p: DedicatedParam) -> None:
        """Moves p.grad into the arena."""
        gradient = p.tensor.grad
        assert gradient is not None
        p.tensor.grad = None
        gradient = gradient.detach()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        boundary = p.boundary
        if not boundary.open:
            self._claim(boundary)
        self._streams[boundary.index].here(gradient)
        if p.filled:
            p.grad.add_(gradient)
        else:
            p.grad.copy_(gradient)
            p.filled = True
        syncing = self._ctx.syncing
        if syncing:
            self._unfinished = True
        if (syncing or self._send_each) and not p.arrived:
            p.arrived = True
            boundary.arrived += 1
            if boundary.arrived == boundary.expected:
                self._ready(boundary)

    def _claim(self, boundary: Boundary) -> None:
        """Makes the boundary's place in GRAD ours. A boundary that shares the window is sent first."""
        if self._send_each:
            other = self._holder.get(boundary.window)
            if other is not None and other is not boundary and other.open:
                self._ready(other)
            self._holder[boundary.window] = boundary
        # A forward of the boundary has waited for this; gradients that are put into p.grad by hand have not. The owner
        # may still need the last gradient for its update.
        self._session.wait_weights(boundary.index)
        self._session.wait_grad_writable(boundary.index)
        boundary.open = True

    def _ready(self, boundary: Boundary) -> None:
        present = []
        for p in boundary.params:
            if p.filled:
                present.append(p.index)
            else:
                p.grad.zero_()
            p.filled = p.arrived = False
        boundary.open = False
        boundary.arrived = 0
        self.sent = True
        with device.current(self._session):
            self._session.ready(boundary.index, present, self._streams[boundary.index].join())

    def _after_root_forward(self, module: Any, args: Any, output: Any) -> None:
        """The root's outputs tell when a backward pass begins: also under reentrant checkpointing."""
        tensors = graph_tensors(output)
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, self._begin_backward, mode="any")

    @_torch_private.without_dynamo
    def _begin_backward(self, gradient: torch.Tensor) -> None:
        task = _torch_private.current_graph_task_id()
        if task == self._callback_task:
            return  # two forwards, one backward
        self._callback_task = task
        if self._ctx.syncing:
            self._unfinished = True
        _torch_private.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._callback_task = -1
        if self._ctx.syncing or self._send_each:
            self._send_open()
        if self._unfinished:
            self._unfinished = False
            self.sent = True
            self._session.end_backward()

    def _send_open(self) -> None:
        for boundary in self._ctx.boundaries:
            if boundary.open:
                self._ready(boundary)

    def flush(self) -> None:
        """Before a step: sends what is left, also gradients that somebody put into p.grad by hand."""
        for p in self._ctx.params:
            if p.tensor.grad is not None:
                self.take(p)
        left = any(boundary.open for boundary in self._ctx.boundaries)
        self._send_open()
        if self._unfinished or left:
            self._unfinished = False
            self._session.end_backward()

    def begin_generation(self) -> None:
        """After a step, also one that failed for all ranks: the daemon has dropped the gradients."""
        self.sent = False

    def drop(self) -> None:
        """zero_grad: forgets the gradients since the last step, here and in the daemon."""
        for p in self._ctx.params:
            p.tensor.grad = None
            p.filled = p.arrived = False
        for boundary in self._ctx.boundaries:
            boundary.open = False
            boundary.arrived = 0
        self._unfinished = False
        self._callback_task = -1
        if self.sent:
            self.sent = False
            # Another rank may still be in its backward and wait for a window that this rank's owner has not read yet;
            # after the discard it would not be read at all.
            for boundary in self._ctx.boundaries:
                self._session.wait_grad_writable(boundary.index)
            self._session.discard()
