"""Where CUDA's libraries are, for LD_LIBRARY_PATH: prints their folders, with a colon between.

PyTorch's own come first, since one process should not load a library twice; then the toolkit's. What the loader finds
by itself needs no folder. libnccl.so.2 may be missing: only sessions that exchange by NCCL, and torch, need it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

NEEDED = ("libcudart.so.13", "libcublasLt.so.13")
WANTED = ("libnccl.so.2",)


def of_packages(path: Iterable[str]) -> list[Path]:
    """Folders of libraries in a Python path: those of the nvidia-* packages, and torch's."""
    roots = [Path(entry) for entry in path]
    return [folder for root in roots for folder in (*sorted(root.glob("nvidia/*/lib")), root / "torch/lib")]


def of_toolkits(roots: Iterable[str]) -> list[Path]:
    return [Path(root, folder) for root in roots for folder in ("lib64", "targets/x86_64-linux/lib", "lib")]


def of_loader() -> str:
    """What the loader has in its cache, as ldconfig tells it."""
    try:
        return subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=20).stdout
    except OSError:
        return ""


def choose(folders: Sequence[Path], loader: str) -> tuple[list[Path], list[str]]:
    """The folders to add, and the libraries that are nowhere."""
    chosen: list[Path] = []
    missing = []
    for name in (*NEEDED, *WANTED):
        folder = next((f for f in folders if (f / name).exists()), None)
        if folder is None and f"\t{name} " not in loader:
            missing.append(name)
        elif folder is not None and folder not in chosen:
            chosen.append(folder)
    return chosen, missing


def main() -> int:
    toolkits = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
    toolkits += map(str, sorted(Path("/usr/local").glob("cuda-13*"), reverse=True))
    folders, missing = choose(of_packages(sys.path) + of_toolkits(toolkits), of_loader())
    for name in missing:
        kind = "error" if name in NEEDED else "warning"
        print(f"{kind}: no {name} beside torch, in /usr/local/cuda or where the loader looks", file=sys.stderr)
    print(":".join(map(str, folders)))
    return 1 if set(missing) & set(NEEDED) else 0


if __name__ == "__main__":
    sys.exit(main())
