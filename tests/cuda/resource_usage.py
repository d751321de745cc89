"""Reads what ptxas gave each kernel of libdmuon_cuda.so. A kernel that spills, or indexes registers in a way that puts
an array into memory, passes over memory twice: none may.

usage: resource_usage.py libdmuon_cuda.so ARCHITECTURE ...    exit 77: there is no cuobjdump here
"""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

SKIPPED = 77
FUNCTION = re.compile(r"Function (\S+):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def cuobjdump() -> str | None:
    """That of the CUDA toolkit, or the one that comes with triton, which comes with PyTorch."""
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or []) if triton else []:
        file = pathlib.Path(folder) / "backends/nvidia/bin/cuobjdump"
        if file.exists():
            return str(file)
    return None


def main() -> int:
    library, architectures = sys.argv[1], sys.argv[2:]
    tool = cuobjdump()
    if tool is None:
        print("no cuobjdump: neither CUDA's nor triton's")
        return SKIPPED
    report = subprocess.run([tool, "--dump-resource-usage", library], check=True, capture_output=True, text=True).stdout
    spilling = 0
    registers: dict[str, list[int]] = {name: [] for name in architectures}
    for part in report.split("arch = ")[1:]:
        name = part.split()[0]
        for kernel, count, stack, _, local in FUNCTION.findall(part):
            registers.setdefault(name, []).append(int(count))
            if int(stack) or int(local):
                print(f"{name}: {kernel} spills: {stack} bytes of stack, {local} of local memory")
                spilling += 1
    for name, counts in registers.items():
        print(f"{name}: {len(counts)} kernels, at most {max(counts, default=0)} registers")
    return 0 if not spilling and all(registers.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
