"""The vector kernels at full size: against float64, and their share of the copy bandwidth."""

from __future__ import annotations

import sys

import torch
from probe import BF16, FP16, FP32, Backend, Results, median_ms, open_part

BOUND = 1e-6  # relative error of fp32 arithmetic over the whole array; roundings must be exact
COUNT = 4096 * 14336  # 235 MB of fp32: several times the L2
SMALL = 1024 * 4096


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def copy_bandwidth() -> float:
    """GB/s read and written by a device-to-device copy: the ceiling."""
    source, to = torch.randn(2 * COUNT, device="cuda"), torch.empty(2 * COUNT, device="cuda")
    stream = torch.cuda.current_stream()
    to.copy_(source)
    return 2 * source.numel() * 4 / median_ms(stream, lambda: to.copy_(source), 20) / 1e6


def measure(
    backend: Backend, results: Results, name: str, bytes_moved: int, run, check, bound: float = BOUND
) -> None:
    def make():
        torch.cuda.synchronize()
        run()
        backend.synchronize()
        error = check()
        ms = median_ms(backend.torch_stream, run, 20)
        bandwidth = bytes_moved / ms / 1e6
        return {
            "relative_error": error,
            "within": error <= bound,
            "ms": ms,
            "gb_per_s": bandwidth,
            "of_copy": bandwidth / results.data["copy_gb_per_s"],
        }

    results.attempt(name, make)


def mean(backend: Backend, results: Results, ranks: int, dtype: int, torch_dtype: torch.dtype, count: int) -> None:
    inputs = [torch.randn(count, device="cuda").to(torch_dtype) for _ in range(ranks)]
    out = torch.zeros(count, device="cuda")
    square_sum = torch.zeros(1, dtype=torch.float64, device="cuda")

    def check() -> float:
        expected = sum(t.double() for t in inputs) / ranks
        squares = (out.double() ** 2).sum().item()
        return max(relative(out, expected), abs(square_sum.item() / squares - 1))

    size = inputs[0].element_size()
    name = f"mean of {ranks} {torch_dtype} x {count}".replace("torch.", "")
    moved = count * (ranks * size + 4)
    measure(backend, results, name, moved, lambda: backend.mean(inputs, dtype, out, square_sum), check)


def elementwise(backend: Backend, results: Results, count: int) -> None:
    m, g, w, o = (torch.randn(count, device="cuda") for _ in range(4))
    m0, w0 = m.clone(), w.clone()
    update = torch.empty(count, device="cuda")
    mu = torch.tensor(0.95, dtype=torch.float32).double().item()

    measure(
        backend, results, f"lookahead x {count}", 12 * count, lambda: backend.lookahead(m, g, update),
        lambda: relative(update, g.double() + mu * (mu * m.double() + g.double())),
    )  # fmt: skip
    scale = torch.tensor(0.01, dtype=torch.float32).double().item()
    squares = torch.zeros(1, dtype=torch.float64, device="cuda")
    measure(
        backend, results, f"muon commit x {count}", 24 * count, lambda: backend.commit(m, g, w, o, squares),
        lambda: max(
            relative(m, mu * m0.double() + g.double()),
            relative(w, w0.double() * (1 - 1e-4) - scale * o.double()),
            abs(squares.item() / (o.double() ** 2).sum().item() - 1),
        ),
    )  # fmt: skip
    m.copy_(m0)
    v = torch.rand(count, device="cuda")
    v0 = v.clone()
    w.copy_(w0)
    step = 3

    def adamw_error() -> float:
        em = m0.double() + 0.1 * (g.double() - m0.double())
        ev = 0.999 * v0.double() + 0.001 * g.double() ** 2
        ew = w0.double() * (1 - 1e-5)
        ew -= 1e-3 / (1 - 0.9**step) * em / (ev.sqrt() / (1 - 0.999**step) ** 0.5 + 1e-8)
        return max(relative(m, em), relative(v, ev), relative(w, ew))

    measure(backend, results, f"adamw x {count}", 28 * count, lambda: backend.adamw(w, m, v, g, step), adamw_error)
    for dtype, torch_dtype in ((BF16, torch.bfloat16), (FP16, torch.float16), (FP32, torch.float32)):
        to = torch.empty(count, dtype=torch_dtype, device="cuda")
        name = f"publish {torch_dtype} x {count}".replace("torch.", "")
        measure(
            backend, results, name, count * (4 + to.element_size()),
            lambda to=to, dtype=dtype: backend.publish(o, dtype, to),
            lambda to=to, torch_dtype=torch_dtype: float((to != o.to(torch_dtype)).sum().item()), 0,
        )  # fmt: skip


def orthogonality(backend: Backend, results: Results, rows: int, cols: int) -> None:
    """What telemetry costs, beside the Newton-Schulz of the same shape in the timing part."""
    o = torch.linalg.qr(torch.randn(max(rows, cols), min(rows, cols), device="cuda"))[0]
    o = (o.T if rows < cols else o).contiguous()
    error = torch.zeros(1, dtype=torch.float64, device="cuda")

    def make():
        torch.cuda.synchronize()
        backend.orthogonality(o, error)
        backend.synchronize()
        ms = median_ms(backend.torch_stream, lambda: backend.orthogonality(o, error), 20)
        found = error.item() ** 0.5
        return {"error_of_an_orthogonal_matrix": found, "within": found <= 1e-4, "ms": ms}

    results.attempt(f"orthogonality {rows} x {cols}", make)


def main() -> int:
    backend, results = open_part()
    results.put("copy_gb_per_s", copy_bandwidth())
    for ranks, dtype, torch_dtype in (
        (1, BF16, torch.bfloat16),
        (2, BF16, torch.bfloat16),
        (8, BF16, torch.bfloat16),
        (2, FP32, torch.float32),
        (2, FP16, torch.float16),
    ):
        mean(backend, results, ranks, dtype, torch_dtype, COUNT)
    mean(backend, results, 2, BF16, torch.bfloat16, SMALL)
    elementwise(backend, results, COUNT)
    elementwise(backend, results, SMALL)
    for rows, cols in ((1024, 4096), (4096, 1024), (4096, 14336)):
        orthogonality(backend, results, rows, cols)
    return results.code()


if __name__ == "__main__":
    sys.exit(main())
