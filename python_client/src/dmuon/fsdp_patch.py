"""Keeps dedicated parameters out of ``fully_shard``.

``dedicate_params`` marks modules, not parameters, because ``to_empty`` and loading replace Parameter objects:
``module._dmuon`` is the set of the names of the module's dedicated parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from dmuon import _torch_private

MARK = "_dmuon"


def mark(module: nn.Module, leaf: str) -> None:
    module.__dict__.setdefault(MARK, set()).add(leaf)


def dedicated_of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The dedicated parameters that these modules hold themselves."""
    return {
        parameter
        for module in modules
        for leaf in module.__dict__.get(MARK, ())
        if (parameter := module._parameters.get(leaf)) is not None
    }


def install_patch() -> None:
    """Makes ``fully_shard`` skip dedicated parameters. Idempotent; ``import dmuon`` does it.

    On a PyTorch without the private function that it wraps, nothing happens here and ``dedicate_params`` raises.
    """
    try:
        module, name = _torch_private.managed_states_site()
    except _torch_private.MissingInTorch:
        return
    original = getattr(module, name)
    if hasattr(original, "__dmuon_original__"):
        return

    @functools.wraps(original)
    def skip_dedicated(modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None) -> Any:
        dedicated = dedicated_of(modules)
        if not dedicated:
            return original(modules) if ignored_params is None else original(modules, ignored_params)
        return original(modules, dedicated | (ignored_params or set()))

    skip_dedicated.__dmuon_original__ = original  # type: ignore[attr-defined]
    setattr(module, name, skip_dedicated)


def check_patch() -> None:
    """Raises when ``fully_shard`` would not skip dedicated parameters."""
    _torch_private.managed_states_site()
    install_patch()
