"""Notices when a parameter was moved out of its arena, and sends weights that were written in place."""

from __future__ import annotations

from typing import Any

from dmuon import _torch_private
from dmuon.context import DedicatedCommContext
from dmuon.parameter import DedicatedParam


class ArenaCheck:
    """Looks at every dedicated parameter before each forward of the root and before each step."""

    def __init__(self, ctx: DedicatedCommContext) -> None:
        self._ctx = ctx
        self.accept()
        ctx.model.register_forward_pre_hook(_torch_private.without_dynamo(self._before_root_forward))

    def accept(self) -> None:
        """What is there now is right."""
        for p in self._ctx.params:
            p.version = p.tensor._version

    def _before_root_forward(self, module: Any, args: Any) -> None:
        if _torch_private.current_graph_task_id() == -1:
            self.look()

    def look(self) -> None:
        weights, gradients = self._ctx.weights, self._ctx.gradients
        written = []
        for p in self._ctx.params:
            if p.current() is not p.tensor:
                raise _moved(p, "was replaced by another Parameter (load_state_dict(assign=True), to_empty or setattr)")
            address = weights.address(p)
            if address is not None:
                if p.tensor.data_ptr() != address or p.tensor.dtype != p.param_dtype:
                    raise _moved(p, f"was moved to other memory as {p.tensor.dtype} (model.to(), .half() or .data =)")
                version = p.tensor._version
                if version != p.version:
                    p.version = version
                    written.append(p)
            if not p.hooked and p.tensor.requires_grad:
                gradients.hook(p)
                p.boundary.count_expected()
        for p in written:
            # The same write happened on every rank; the owner's values win.
            if p.is_owner:
                p.write_master(self._ctx.session, p.tensor)


def _moved(p: DedicatedParam, how: str) -> RuntimeError:
    return RuntimeError(
        f"parameter '{p.param_name}' {how} after dmuon.Muon took it into memory shared with dmuond, so training would "
        "go on without it. Change dtype and device before dmuon.Muon(model, ...); load weights with "
        "load_state_dict(...) or dmuon.set_model_state_dict(model, ...)"
    )
