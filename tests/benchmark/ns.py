"""Newton-Schulz of the CPU backend against torch's, turn by turn in one process, and both against float64.

Prints a table and, as its last line, one JSON object. Times are minima: other users of the cores only add to them.

    python tests/benchmark/ns.py [--shapes 768x768 ...] [--threads 1 2] [--seconds 4] [--library PATH]
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "dev"
LIBRARY = BUILD / "lib" / "libdmuon_ns_bench.so"

SHAPES = ["768x768", "768x3072", "1024x4096", "2048x2048", "2048x8192"]
JORDAN = (3.4445, -4.7750, 2.0315)  # what torch.optim.Muon runs; ours runs the same for the comparison
STEPS = 5
EPS = 1e-7
FORM_GRAM, DTYPE_DEFAULT, SET_JORDAN = 0, 0, 2  # ns_library.cc
PEAK_FROM = 1024  # the smaller side from which the share of the peak counts


class Library:
    """The C interface of ns_library.cc."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.ns_error.restype = ctypes.c_char_p
        self._lib.ns_kernel.restype = ctypes.c_char_p
        self._lib.ns_kernel.argtypes = [ctypes.c_void_p]
        self._lib.ns_peak.restype = ctypes.c_double
        self._lib.ns_run.argtypes = [ctypes.c_void_p] * 3
        self._lib.ns_run.restype = None

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self._lib.ns_error().decode())

    def best_kernel(self) -> str:
        name = ctypes.create_string_buffer(64)
        self._check(self._lib.ns_best_kernel(name, len(name)))
        return name.value.decode()

    def peak(self, kernel: str, bf16: bool, threads: int) -> float:
        return self._lib.ns_peak(kernel.encode(), int(bf16), threads)

    def plan(self, threads: int, rows: int, cols: int) -> tuple[str, Callable[[np.ndarray, np.ndarray], None]]:
        """The default's plan for a shape: the name of what runs, and a function (in, out)."""
        backend, plan = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._lib.ns_backend(b"", threads, ctypes.byref(backend)))
        self._check(
            self._lib.ns_plan(
                backend,
                FORM_GRAM,
                DTYPE_DEFAULT,
                SET_JORDAN,
                ctypes.c_int64(rows),
                ctypes.c_int64(cols),
                ctypes.byref(plan),
            )
        )

        def run(x: np.ndarray, out: np.ndarray) -> None:
            self._lib.ns_run(plan, x.ctypes.data, out.ctypes.data)

        return self._lib.ns_kernel(plan).decode(), run


def torch_bf16(x: torch.Tensor) -> torch.Tensor:
    return _zeropower_via_newtonschulz(x, JORDAN, STEPS, EPS)


def torch_fp32(x: torch.Tensor) -> torch.Tensor:
    """The plain direct form, as a user would write it."""
    a, b, c = JORDAN
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + EPS)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def exact(x: torch.Tensor) -> torch.Tensor:
    """The polynomial in float64, on the eigenvalues of X X^T."""
    a, b, c = JORDAN
    x = x.double()
    x = x / (x.norm() + EPS)
    squares, vectors = torch.linalg.eigh(x @ x.T)
    factor = torch.ones_like(squares)
    for _ in range(STEPS):
        step = a + b * squares + c * squares**2
        factor, squares = factor * step, squares * step**2
    return (vectors * factor) @ (vectors.T @ x)


def gaussian(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols))


def power_law(rows: int, cols: int) -> torch.Tensor:
    """sigma_i = 1 / i."""
    m = min(rows, cols)
    left = torch.linalg.qr(gaussian(rows, m))[0]
    right = torch.linalg.qr(gaussian(cols, m))[0]
    return (left / torch.arange(1, m + 1)) @ right.T


def ideal_seconds(kernel: str, m: int, n: int, peak: dict[str, float]) -> float:
    """Of the form that ran, each product at the peak of its dtype and symmetric ones at half their cost."""
    wide, small = float(m * m * n), float(m**3)
    if kernel.startswith("gram mixed"):
        # X X^T, Q X and the last two of the m x m products in bf16.
        return (3 * wide + 2 * small) / peak["bf16"] + (4 * STEPS - 5) * small / peak["fp32"]
    if kernel.startswith("gram"):
        return (3 * wide + (4 * STEPS - 3) * small) / peak["fp32"]
    return STEPS * (3 * wide + small) / peak["bf16" if "bf16" in kernel.split(" (")[0] else "fp32"]


def fastest(contestants: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The least time of each, all taking turns for `seconds`."""
    best = dict.fromkeys(contestants, float("inf"))
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for name, run in contestants.items():
            time.sleep(0.002)  # the last one's threads stop spinning
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def errors(library: Library, rows: int, cols: int) -> dict[str, tuple[float, float]]:
    """For each spectrum: ours and torch's relative Frobenius error."""
    _, run = library.plan(torch.get_num_threads(), rows, cols)
    result = {}
    for name, make in (("gaussian", gaussian), ("1/i", power_law)):
        x = make(rows, cols)
        reference = exact(x)
        out = np.empty((rows, cols), np.float32)
        run(x.numpy(), out)
        result[name] = (
            relative_error(torch.from_numpy(out), reference),
            relative_error(torch_bf16(x), reference),
        )
    return result


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def build(library: Path) -> None:
    command = ["cmake", "--build", str(BUILD), "--target", "dmuon_ns_bench"]
    if library == LIBRARY and (BUILD / "build.ninja").exists():
        subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=4, help="of turns for each shape and thread count")
    parser.add_argument("--library", type=Path, default=LIBRARY)
    options = parser.parse_args()
    build(options.library)
    library = Library(options.library)
    kernel = library.best_kernel()
    dtypes = ["fp32", "bf16"] if kernel == "avx512_bf16" else ["fp32"]
    print(f"{processor()}, kernels {kernel}, torch {torch.__version__}, coefficients {JORDAN} x {STEPS}")
    print("times in ms, minima of turns; of peak: symmetric FLOPs, over a loop on registers in each product's dtype\n")
    print(
        f"{'shape':>10} {'threads':>7} {'ours':>8} {'torch':>8} {'over':>5} {'fp32':>8} {'over':>5} {'of peak':>7}"
        f"  {'error: gaussian':>19} {'1/i':>19}   form"
    )

    ratios: dict[str, list[float]] = {"wide": [], "square": []}
    error_ratios: dict[str, list[float]] = {"wide": [], "square": []}
    shares = []
    for shape in options.shapes:
        rows, cols = (int(side) for side in shape.split("x"))
        kind = "square" if rows == cols else "wide"
        torch.set_num_threads(max(options.threads))
        error = errors(library, rows, cols)
        error_ratios[kind] += [ours / theirs for ours, theirs in error.values()]
        for threads in options.threads:
            torch.set_num_threads(threads)
            name, run = library.plan(threads, rows, cols)
            x = gaussian(rows, cols)
            out = np.empty((rows, cols), np.float32)
            peak = dict.fromkeys(dtypes, 0.0)

            def measure_peak(peak: dict[str, float] = peak, threads: int = threads) -> None:
                for dtype in dtypes:
                    peak[dtype] = max(peak[dtype], library.peak(kernel, dtype == "bf16", threads))

            best = fastest(
                {
                    "ours": lambda run=run, x=x, out=out: run(x.numpy(), out),
                    "torch": lambda x=x: torch_bf16(x),
                    "peak": measure_peak,
                },
                options.seconds,
            )
            best |= fastest({"fp32": lambda x=x: torch_fp32(x)}, 0)
            share = ideal_seconds(name, min(rows, cols), max(rows, cols), peak) / best["ours"]
            ratios[kind].append(best["ours"] / best["torch"])
            if min(rows, cols) >= PEAK_FROM:
                shares.append(share)
            both = "  ".join(f"{ours:.1e} : {theirs:.1e}" for ours, theirs in error.values())
            print(
                f"{shape:>10} {threads:>7} {best['ours'] * 1e3:>8.1f} {best['torch'] * 1e3:>8.1f}"
                f" {best['ours'] / best['torch']:>5.2f} {best['fp32'] * 1e3:>8.1f} {best['ours'] / best['fp32']:>5.2f}"
                f" {share:>7.2f}  {both}   {name}",
                flush=True,
            )

    def largest(values: list[float]) -> float | None:
        return round(max(values), 3) if values else None

    print(
        json.dumps(
            {
                "wide_over_torch_max": largest(ratios["wide"]),
                "square_over_torch_max": largest(ratios["square"]),
                "wide_error_over_torch_max": largest(error_ratios["wide"]),
                "square_error_over_torch_max": largest(error_ratios["square"]),
                "peak_share_min": round(min(shares), 3) if shares else None,
                "processor": processor(),
                "kernel": kernel,
            }
        )
    )


if __name__ == "__main__":
    main()
