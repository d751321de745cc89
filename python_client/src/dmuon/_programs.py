"""The programs that are installed with the package: dmuond and dmuonctl."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def find(name: str) -> str | None:
    """The path of ``dmuond`` or ``dmuonctl``: beside this package, else on PATH."""
    own = Path(__file__).parent / "bin" / name
    return str(own) if os.access(own, os.X_OK) else shutil.which(name)


def _run(name: str) -> None:
    own = Path(__file__).parent / "bin" / name
    if not os.access(own, os.X_OK):
        sys.exit(f"{name}: not in this installation of dmuon; build it with cmake, see the README")
    os.execv(own, [name, *sys.argv[1:]])


def dmuond() -> None:
    _run("dmuond")


def dmuonctl() -> None:
    _run("dmuonctl")
