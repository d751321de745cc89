"""Newton-Schulz against the exact polynomial in float64: Gaussian matrices and hard spectra, each dtype and form."""

from __future__ import annotations

import sys

import torch
from probe import BF16, DTYPE_NAMES, FP16, FP32, Backend, Results, open_part

POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
SCHEDULE = [(a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in POLAR_EXPRESS]

# docs/numerics.md: the relative error on a Gaussian, and what the largest singular value may be for any spectrum.
BOUNDS = {FP32: (1e-5, 1.124 + 0.005), FP16: (2e-3, 1.124 + 0.05), BF16: (2e-2, 1.124 + 0.2)}


def exact(x: torch.Tensor) -> torch.Tensor:
    """The polynomial in float64."""
    tall = x.shape[0] > x.shape[1]
    y = x.double().T if tall else x.double()
    y = y / (y.norm() + 1e-7 * y.abs().max())
    for a, b, c in SCHEDULE:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if tall else y


def torch_muon(x: torch.Tensor) -> torch.Tensor:
    """torch.optim.Muon's arithmetic (bf16, direct) with the same coefficients: what to be judged beside."""
    tall = x.shape[0] > x.shape[1]
    y = x.bfloat16()
    y = y.T if tall else y
    y = y / y.norm().clamp(min=1e-7)
    for a, b, c in SCHEDULE:
        gram = y @ y.T
        gram_update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.addmm(y, gram_update, y, beta=a)
    return y.T if tall else y


def top(x: torch.Tensor) -> float:
    """The largest singular value, by power iteration in float64."""
    y = x.double()
    v = torch.ones(y.shape[1], dtype=torch.float64, device="cuda")
    for _ in range(100):
        v = y.T @ (y @ v)
        v = v / v.norm()
    return (y @ v).norm().item()


def with_spectrum(m: int, n: int, sigma: torch.Tensor) -> torch.Tensor:
    u = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64, device="cuda"))[0]
    v = torch.linalg.qr(torch.randn(n, m, dtype=torch.float64, device="cuda"))[0]
    return ((u * sigma) @ v.T).float().contiguous()


def inputs(m: int, n: int) -> dict[str, torch.Tensor]:
    i = torch.arange(m, dtype=torch.float64, device="cuda")
    return {
        "gaussian": torch.randn(m, n, device="cuda"),
        "1/i": with_spectrum(m, n, 1 / (i + 1)),
        "1/i^2": with_spectrum(m, n, 1 / (i + 1) ** 2),
        "to 1e-4": with_spectrum(m, n, 10 ** (-4 * i / (m - 1))),
        "to 1e-10": with_spectrum(m, n, 10 ** (-10 * i / (m - 1))),
        "spike": with_spectrum(m, n, torch.where(i == 0, 1.0, 1e-3)),
    }


def judge(out: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    error = ((out.double() - expected).norm() / expected.norm()).item()
    return {"error": error, "top": top(out), "expected_top": top(expected)}


def one(backend: Backend, x: torch.Tensor, expected: torch.Tensor, dtype: int, name: str | None, **options) -> dict:
    """`name`: of the spectrum, for its bounds; None: there are none."""
    plan = backend.plan(x.shape[0], x.shape[1], dtype, measure=False, **options)
    out = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    plan.run(x, out)
    backend.synchronize()
    result = judge(out, expected)
    result["kernel"] = plan.info["kernel"]
    out2 = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    for _ in range(5):
        plan.run(x, out2)
    backend.synchronize()
    result["same_bits"] = bool((out == out2).all().item())
    plan.close()
    if name is not None:
        error, largest = BOUNDS[dtype]
        small = name != "gaussian" or result["error"] <= error
        result["within"] = small and result["same_bits"] and result["top"] <= largest
    return result


def shape(backend: Backend, results: Results, m: int, n: int, spectra: list[str] | None) -> None:
    for name, x in inputs(m, n).items():
        if spectra is not None and name not in spectra:
            continue
        expected = exact(x)
        key = f"{m}x{n} {name}"
        results.attempt(f"{key}: torch bf16", lambda x=x, e=expected: judge(torch_muon(x), e))
        for dtype in (FP16, BF16, FP32):
            for direct in (False, True) if n > 1.5 * m else (True,):
                form = "direct" if direct else "gram"
                results.attempt(
                    f"{key}: {form} {DTYPE_NAMES[dtype]}",
                    lambda x=x, e=expected, d=dtype, f=direct, s=name: one(backend, x, e, d, s, direct=f),
                )
        # What it costs in accuracy not to mirror, and to compute one triangle in blocks.
        for gram, square in (("whole", "whole"), ("levels2", "levels2"), ("panels4", "panels4")):
            results.attempt(
                f"{key}: fp16 {gram}/{square}",
                lambda x=x, e=expected, g=gram, s=square: one(backend, x, e, FP16, None, gram=g, square=s),
            )


def large(backend: Backend, rows: int, cols: int) -> dict:
    x = torch.randn(rows, cols, device="cuda")
    return one(backend, x, exact(x), FP16, "gaussian")


def main() -> int:
    torch.manual_seed(0)
    backend, results = open_part()
    shape(backend, results, 1024, 4096, None)
    shape(backend, results, 1024, 1024, ["gaussian", "1/i", "to 1e-4"])
    shape(backend, results, 512, 1024, ["gaussian", "1/i"])
    shape(backend, results, 2048, 4096, ["gaussian", "1/i"])
    for rows, cols in ((14336, 4096), (8192, 28672)):
        results.attempt(f"{rows}x{cols} gaussian: gram fp16", lambda r=rows, c=cols: large(backend, r, c), 20)
    return results.code()


if __name__ == "__main__":
    sys.exit(main())
