"""Gathers the parts' JSON files into gpu_check.json and prints the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def load(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def tests(folder: Path) -> dict[str, Any]:
    out = {}
    for path in sorted(folder.glob("*_test.json")):
        run = json.loads(path.read_text())
        failures = [
            {"test": case["name"], "failures": [f["failure"][:400] for f in case["failures"][:5]]}
            for suite in run.get("testsuites", [])
            for case in suite["testsuite"]
            if "failures" in case
        ]
        out[path.stem] = {"tests": run["tests"], "failed": run["failures"], "time": run["time"], "failures": failures}
        path.unlink()
    return out


def number(value: Any, form: str = "{:.3g}") -> str:
    return form.format(value) if isinstance(value, (int, float)) else str(value)


def print_timing(timing: dict[str, Any]) -> None:
    if not timing:
        return
    print(
        f"\npeak fp16 {number(timing.get('peak', {}).get('tflops'))} TFLOP/s, "
        f"bf16 {number(timing.get('peak bf16', {}).get('tflops'))}"
    )
    for key, value in timing.items():
        if key.startswith("matmul"):
            print(f"  {key}: {number(value['ms'])} ms, {number(value['tflops'])} TFLOP/s")
    print(f"  host: {timing.get('host_ms')}")
    print(
        "\nshape | torch eager | compiled | graph | dmuon | no graph | whole | direct | over compiled | over graph "
        "| share of peak | kernel (ms)"
    )
    for key, value in timing.items():
        if not isinstance(value, dict) or "ms" not in value or "over_torch_compiled" not in value:
            continue
        ms = value["ms"]
        names = (
            "torch eager",
            "torch compiled",
            "torch compiled, graph",
            "dmuon",
            "dmuon, no graph",
            "dmuon, whole products",
            "dmuon, direct",
        )
        cells = [number(ms.get(name, "-"), "{:.4g}") for name in names]
        cells += [number(value.get(k, "-")) for k in ("over_torch_compiled", "over_torch_graph", "share_of_peak")]
        print(" | ".join([key, *cells, value["kernel"]]))
    for key, value in timing.items():
        if key.endswith(" dmuon plan"):
            for kind in ("gram", "square"):
                cuts = " ".join(f"{c['cut']}:{c['ms'] * 1e3:.1f}{'' if c['agrees'] else '!'}" for c in value[kind])
                print(f"  {key[:-5]} {kind} (us): {cuts}   [{value['plan_ms']:.0f} ms to plan]")


def print_accuracy(accuracy: dict[str, Any]) -> None:
    print("\nNewton-Schulz against float64: relative error / top singular value over the expected one")
    rows: dict[str, dict[str, str]] = {}
    for key, value in accuracy.items():
        if not isinstance(value, dict) or "error" not in value:
            continue
        matrix, _, variant = key.partition(": ")
        if "top" in value:
            cell = f"{value['error']:.1e}/{value['top'] - value['expected_top']:+.3f}"
            cell += "" if value.get("same_bits", True) else " BITS DIFFER"
        else:
            cell = str(value["error"])[:40]
        rows.setdefault(matrix, {})[variant] = cell
    for matrix, cells in rows.items():
        print(f"  {matrix}: " + ", ".join(f"{variant} {cell}" for variant, cell in cells.items()))


def print_trainer(trainer: dict[str, Any]) -> None:
    for key, value in trainer.items():
        print(f"trainer, {key}: " + ", ".join(f"{name} {number(figure)}" for name, figure in value.items()))


def print_kernels(kernels: dict[str, Any]) -> None:
    print(f"\nvector kernels; copy {number(kernels.get('copy_gb_per_s'))} GB/s")
    for key, value in kernels.items():
        if isinstance(value, dict) and "ms" in value:
            print(
                f"  {key}: error {value['relative_error']:.1e}, {value['ms'] * 1e3:.1f} us, "
                f"{value['gb_per_s']:.0f} GB/s, {value['of_copy']:.2f} of copy"
            )
        elif isinstance(value, dict):
            print(f"  {key}: {value}")


def main() -> None:
    folder = Path(sys.argv[1])
    report = {"tests": tests(folder)}
    for part in ("trainer", "timing", "accuracy", "kernels"):
        report[part] = load(folder, part)
        (folder / f"{part}.json").unlink(missing_ok=True)
    sanitizer = folder / "sanitizer.txt"
    if sanitizer.exists():
        report["sanitizer"] = sanitizer.read_text().splitlines()
        sanitizer.unlink()
    (folder / "gpu_check.json").write_text(json.dumps(report, indent=1))
    for name, run in report["tests"].items():
        print(f"{name}: {run['tests']} tests, {run['failed']} failed, {run['time']}")
    print_trainer(report["trainer"])
    print_accuracy(report["accuracy"])
    print_kernels(report["kernels"])
    print_timing(report["timing"])


if __name__ == "__main__":
    main()
