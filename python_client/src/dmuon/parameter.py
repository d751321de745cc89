"""A dedicated parameter and its boundary, as this rank sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


def _native() -> Any:
    from dmuon import _native  # on first use: importing dmuon loads no client

    return _native


@dataclass(eq=False)
class Boundary:
    """The parameters that travel together, and what is known of their place in the arenas."""

    index: int
    name: str
    module: nn.Module
    exclusive: bool
    params: list[DedicatedParam] = field(default_factory=list)
    window: int = 0

    # Gradients: what lies in the GRAD arena since the last READY.
    open: bool = False  # the arena is ours to write
    arrived: int = 0  # parameters whose gradient came in the backward passes that count
    expected: int = 0  # trainable parameters

    # Weights.
    fresh: bool = False  # Z2: the published weights of the last step are here
    resident: bool = False  # Z3: the boundary holds its window
    running: int = 0  # Z3: forwards under way
    starts: list[int] = field(default_factory=list)  # Z3: sequence numbers at which they began
    backwards: list[tuple[int, int]] = field(default_factory=list)  # Z3: (graph task, start) under way
    displaced: list[Boundary | None] = field(default_factory=list)  # Z3: put back when a recomputation ends

    def count_expected(self) -> None:
        self.expected = sum(p.tensor.requires_grad for p in self.params)


class DedicatedParam:
    """One dedicated parameter. Public attributes are what ``get_dedicated_params`` promises."""

    def __init__(
        self,
        index: int,
        param_name: str,
        tensor: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        route: str,
        boundary: Boundary,
    ) -> None:
        self.index = index
        self.param_name = param_name
        self.route = route
        self.shape = self.full_shape = torch.Size(tensor.shape)
        self.numel = tensor.numel()
        self.owner_rank = -1  # until the session is open
        self.is_owner = False
        self.shard_dim: int | None = None  # no tensor parallelism yet
        self.tp_group: Any = None
        self.is_tp_owner = False
        self.is_dtensor = False

        self.boundary = boundary
        self.places = places  # modules that hold it, and under which name; several when it is tied
        self.tensor = tensor
        self.original_dtype = tensor.dtype
        self.param_dtype = tensor.dtype
        self.grad_dtype = torch.float32

        # From adoption on.
        self.cls: type = type(tensor)
        self.weight: torch.Tensor  # view of the WEIGHT arena
        self.grad: torch.Tensor  # view of the GRAD arena
        self.version = 0  # tensor._version as last seen
        self.filled = False  # its place in GRAD holds a gradient that was not sent
        self.arrived = False
        self.hooked = False

    def current(self) -> nn.Parameter | None:
        """The Parameter object that the model holds now."""
        module, leaf = self.places[0]
        return module._parameters.get(leaf)

    def write_master(self, session: Any, values: torch.Tensor) -> None:
        """Makes `values` the fp32 master weights in the daemon."""
        flat = values.detach().to("cpu", torch.float32).contiguous().reshape(-1)
        session.write_state(self.param_name, _native().StateKind.WEIGHT, flat.view(torch.uint8))

    def read_master(self, session: Any) -> torch.Tensor:
        """A fresh tensor with the fp32 master weights of the daemon, in the dtype of before the adoption."""
        flat = torch.utils.dlpack.from_dlpack(session.read_state(self.param_name, _native().StateKind.WEIGHT))
        return flat.view(torch.float32).reshape(self.shape).to(self.original_dtype)

    def __repr__(self) -> str:
        return (
            f"DedicatedParam({self.param_name!r}, shape={tuple(self.shape)}, route={self.route!r}, "
            f"owner_rank={self.owner_rank})"
        )
