"""Boundaries: the modules whose parameters travel together and whose hooks wait for them."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

_LAYER = re.compile(r"(?:^|.*\.)(?:layers|blocks)\.\d+(?=\.|$)")


def ancestors(path: str) -> list[str]:
    """The path itself and all modules above it, the root "" last."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _common(paths: list[str]) -> str:
    """The lowest common ancestor."""
    shared = set(ancestors(paths[0])).intersection(*(ancestors(p) for p in paths[1:]))
    return max(shared, key=len)


def _callable(model: nn.Module, path: str) -> str:
    """The lowest module from `path` up that has a forward: the hooks of a ModuleList never run."""
    for candidate in ancestors(path):
        module = model.get_submodule(candidate)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            return candidate
    return ""


class BoundaryRule:
    """Says to which module a parameter's hooks belong, by its full name."""

    def __init__(
        self,
        model: nn.Module,
        predicate: Callable[[nn.Module], bool] | None,
        strict: bool,
        resolver: Callable[[str, nn.Parameter], nn.Module | None] | None,
    ) -> None:
        self._model = model
        self._predicate = predicate
        self._strict = strict
        self._resolver = resolver
        self._names = {id(module): name for name, module in model.named_modules()}

    def of(self, name: str, parameter: nn.Parameter, holders: list[str]) -> str:
        """The boundary of one parameter. `holders`: paths of all modules that hold it (several when it is tied)."""
        if self._resolver is not None:
            found = self._resolver(name, parameter)
            if found is not None:
                if id(found) not in self._names:
                    raise ValueError(f"hook_boundary_resolver gave a module outside the model for parameter '{name}'")
                return self._names[id(found)]
            if self._strict:
                raise ValueError(f"hook_boundary_resolver gave no module for parameter '{name}'")
        return _callable(self._model, _common([self._one(name, holder) for holder in holders]))

    def _one(self, name: str, holder: str) -> str:
        if self._predicate is None:
            match = _LAYER.match(holder)
            return match.group(0) if match else ""
        for candidate in ancestors(holder):
            if self._predicate(self._model.get_submodule(candidate)):
                return candidate
        if self._strict:
            raise ValueError(f"hook_boundary_predicate matches no module above parameter '{name}'")
        return holder


def contains(outer: str, inner: str) -> bool:
    return outer != inner and (outer == "" or inner.startswith(outer + "."))
