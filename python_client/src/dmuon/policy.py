"""How one parameter is treated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUTES = ("muon", "adamw", "sharded_adamw")


@dataclass(frozen=True)
class DMuonParamPolicy:
    """The resolved policy of one parameter. None: as without a policy."""

    route: str | None = None
    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    master_dtype: torch.dtype | None = torch.float32
    optim_dtype: torch.dtype | None = torch.float32
    muon_forward_unshard: str | None = None
    matched_overrides: tuple[str, ...] = ()


_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "f32": torch.float32,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16, "f16": torch.float16,
}  # fmt: skip


def parse_dtype(dtype: torch.dtype | str | None, argument: str) -> torch.dtype | None:
    """A dtype, or its name; "", "none" and "null" are None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.lower().removeprefix("torch.")
    if name in ("", "none", "null"):
        return None
    if name not in _DTYPES:
        raise ValueError(f"{argument}: unknown dtype '{dtype}'; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def check_route(route: str, name: str) -> str:
    """A route that can be run now."""
    if route not in ROUTES:
        raise ValueError(f"parameter '{name}': unknown route '{route}'; expected one of {', '.join(ROUTES)}")
    if route == "sharded_adamw":
        raise NotImplementedError(f"parameter '{name}': the route 'sharded_adamw' is not built yet")
    return route
