"""What the CUDA backend is meant to reach, and how the measured figures stand to it."""

from __future__ import annotations

from typing import Any

SHAPES = [(1024, 4096), (2048, 8192), (4096, 4096), (4096, 14336), (8192, 28672)]
FUSED = ("mean", "lookahead", "muon commit", "adamw", "publish")  # of kernels.py
LARGE = 4096 * 14336  # elements: several times the L2


def _figure(part: dict[str, Any], entry: str, key: str) -> float | None:
    value = part.get(entry)
    return value.get(key) if isinstance(value, dict) else None


def _least_share_of_copy(kernels: dict[str, Any]) -> float | None:
    names = [key for key in kernels if key.startswith(FUSED) and key.endswith(f"x {LARGE}")]
    shares = [_figure(kernels, name, "of_copy") for name in names]
    return None if not shares or None in shares else min(shares)


def goals(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a goal: what, goal, measured (None: not), met (None: not measured)."""
    timing, peer, host = (report.get(part, {}) for part in ("timing", "peer", "host"))
    rows: list[tuple[str, str, float, float | None]] = []
    shapes = [f"{m}x{n}" for m, n in SHAPES]
    for shape in shapes:
        over = _figure(timing, shape, "over_torch_compiled")
        rows.append((f"Newton-Schulz {shape} fp16, time over torch's direct bf16 compiled", "<=", 0.5, over))
    for shape in shapes:
        over = _figure(peer, shape, "over_peer")
        rows.append((f"Newton-Schulz {shape} fp16, time over the Triton gram peer", "<=", 1.2, over))
    for shape in shapes[1:]:
        share = _figure(timing, shape, "share_of_peak")
        rows.append((f"Newton-Schulz {shape} fp16, symmetric FLOPs over the GEMM peak", ">=", 0.65, share))
    least = _least_share_of_copy(report.get("kernels", {}))
    rows.append(("fused vector kernels, the least one's share of copy bandwidth", ">=", 0.85, least))
    rows.append(("record to the first kernel's result, us", "<=", 40, host.get("trigger_us_p50")))
    rows.append(("host time of a step of 50 matrices, ms", "<=", 1, host.get("host_ms_per_step")))
    return [
        {
            "what": what,
            "goal": f"{sign} {bound:g}",
            "measured": measured,
            "met": None if measured is None else measured <= bound if sign == "<=" else measured >= bound,
        }
        for what, sign, bound, measured in rows
    ]
