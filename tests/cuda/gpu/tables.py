"""The tables of gpu_check.json for people."""

from __future__ import annotations

from typing import Any


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
        if not isinstance(value, dict) or "share_of_peak" not in value:
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


def print_host(host: dict[str, Any]) -> None:
    if "host_ms_per_step" in host:
        print(f"host: {host['host_ms_per_step']:.3f} ms for a step of {host['matrices']} matrices")
    if "trigger_us_p50" in host:
        print(f"record to the first kernel's result: {host['trigger_us_p50']:.1f} us, p99 {host['trigger_us_p99']:.1f}")


def print_peer(peer: dict[str, Any]) -> None:
    if "peer" in peer:
        print(f"\npeer: {peer['peer']}")
    for key, value in peer.items():
        if isinstance(value, dict) and "over_peer" in value:
            ms = value["ms"]
            print(f"  {key}: peer {ms['peer']:.4g} ms, dmuon {ms['dmuon']:.4g} ms, ratio {value['over_peer']:.3g}")
        elif isinstance(value, dict):
            print(f"  {key}: {value}")


def print_goals(goals: list[dict[str, Any]]) -> None:
    print("\nwhat | goal | measured")
    for goal in goals:
        measured = "not measured" if goal["met"] is None else number(goal["measured"])
        print(f"{goal['what']} | {goal['goal']} | {measured}{' NOT MET' if goal['met'] is False else ''}")


def print_accuracy(accuracy: dict[str, Any]) -> None:
    if not accuracy:
        return
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
    if not kernels:
        return
    print(f"\nvector kernels; copy {number(kernels.get('copy_gb_per_s'))} GB/s")
    for key, value in kernels.items():
        if isinstance(value, dict) and "gb_per_s" in value:
            print(
                f"  {key}: error {value['relative_error']:.1e}, {value['ms'] * 1e3:.1f} us, "
                f"{value['gb_per_s']:.0f} GB/s, {value['of_copy']:.2f} of copy"
            )
        elif isinstance(value, dict):
            print(f"  {key}: {value}")
