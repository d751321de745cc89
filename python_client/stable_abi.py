"""What the wheel depends on beyond pyproject.toml: asked by its build backend (tool.dynamic-metadata)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """A module that is linked for DMUON_STABLE_ABI has no nanobind of its own."""
    split = os.environ.get("DMUON_STABLE_ABI", "0") != "0"
    return {"dependencies": ["nanobind-backend>=1.0"] if split else []}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    return {"dependencies": True}
