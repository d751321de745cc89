"""The programs that come with the package."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def find(name: str) -> str | None:
    """The path of ``dmuond`` or ``dmuonctl``: of this installation, else on PATH."""
    package = Path(__file__).parent
    folders = (
        package / "bin",  # the build folder
        package.parent / "dmuon.scripts",  # a wheel with its libraries: what is in "scripts" of that only starts these
        package.parent / "bin",  # pip install --target
        Path(sysconfig.get_path("scripts")),
        Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))),
        Path(sys.executable).parent,
    )
    own = (str(folder / name) for folder in folders if os.access(folder / name, os.X_OK))
    return next(own, None) or shutil.which(name)
