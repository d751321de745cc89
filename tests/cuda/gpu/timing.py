"""Newton-Schulz beside torch's direct bf16 form, compiled, in the same run; products; host time of launching."""

from __future__ import annotations

import statistics
import sys
import time

import torch
from accuracy import SCHEDULE
from goals import SHAPES
from probe import FP16, Backend, Plan, Results, median_ms, open_part

RATIOS = {
    "over_torch_eager": "torch eager",
    "over_torch_compiled": "torch compiled",
    "over_torch_graph": "torch compiled, graph",
}
STEPS = 5
EPS = 1e-7


def newton_schulz(grad: torch.Tensor) -> torch.Tensor:
    """torch.optim._muon._zeropower_via_newtonschulz, with the default coefficients of dmuon: the same work."""
    ortho = grad.bfloat16()
    ortho = ortho / ortho.norm().clamp(min=EPS)
    for a, b, c in SCHEDULE:
        gram = ortho @ ortho.T
        gram_update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        ortho = torch.addmm(ortho, gram_update, ortho, beta=a)
    return ortho


def full_flops(m: int, n: int) -> float:
    return STEPS * (4 * m * m * n + 2 * m**3)


def symmetric_flops(m: int, n: int, kernel: str) -> float:
    if kernel.startswith("direct"):
        return STEPS * (3 * m * m * n + m**3)
    return 6 * m * m * n + 14 * m**3  # two segments


def matmul_peak(dtype: torch.dtype, m: int, n: int, k: int) -> dict[str, float]:
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    run = lambda: torch.mm(a, b.T, out=out)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            run()
    ms = median_ms(torch.cuda.current_stream(), graph.replay, 7) / 8
    return {"ms": ms, "tflops": 2 * m * n * k / ms / 1e9}


class Contender:
    def __init__(self, name: str, stream: torch.cuda.Stream, run) -> None:
        self.name, self.stream, self.run = name, stream, run


def torch_contenders(x: torch.Tensor, results: Results, label: str) -> list[Contender]:
    current = torch.cuda.current_stream()
    contenders = [Contender("torch eager", current, lambda: newton_schulz(x))]
    try:
        compiled = torch.compile(newton_schulz, dynamic=False)
        start = time.monotonic()
        compiled(x)
        torch.cuda.synchronize()
        results.put(f"{label} torch.compile seconds", round(time.monotonic() - start, 1))
        contenders.append(Contender("torch compiled", current, lambda: compiled(x)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compiled(x)
        contenders.append(Contender("torch compiled, graph", current, graph.replay))
    except Exception as error:  # no C compiler, no triton
        results.skip(f"{label} torch.compile", f"{type(error).__name__}: {error}")
    return contenders


def own_contenders(
    backend: Backend, x: torch.Tensor, results: Results, label: str
) -> tuple[list[Contender], list[Plan]]:
    m, n = x.shape
    out = torch.empty_like(x)
    contenders, plans = [], []

    def add(name: str, **options) -> None:
        try:
            plan = backend.plan(m, n, FP16, **options)
        except RuntimeError as error:
            results.put(f"{label} {name}", {"error": str(error)[:500]})
            return
        plans.append(plan)
        results.put(f"{label} {name} plan", plan.info)
        contenders.append(Contender(name, backend.torch_stream, lambda: plan.run(x, out)))

    add("dmuon")
    add("dmuon, no graph", prepare=False)
    add("dmuon, whole products", gram="mirror", square="mirror")
    if n > 1.5 * m:
        add("dmuon, direct", direct=True)
    return contenders, plans


def in_turn(contenders: list[Contender], m: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median and least ms of each. In turn, so that clocks and heat are shared."""
    for c in contenders:  # warm
        c.run()
        c.run()
    torch.cuda.synchronize()
    repeats = 10 if m <= 1024 else 4 if m <= 2048 else 1
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    for _ in range(7 if m < 8192 else 3):
        for c in contenders:
            torch.cuda.synchronize()
            times[c.name].append(median_ms(c.stream, c.run, 1, repeats))
    torch.cuda.synchronize()
    return {name: statistics.median(t) for name, t in times.items()}, {name: min(t) for name, t in times.items()}


def compete(backend: Backend, results: Results, m: int, n: int) -> dict:
    label = f"{m}x{n}"
    x = torch.randn(m, n, device="cuda")
    torch.cuda.synchronize()
    own, plans = own_contenders(backend, x, results, label)
    ms, least = in_turn(torch_contenders(x, results, label) + own, m)
    backend.synchronize()
    entry: dict = {"ms": ms, "ms_min": least}
    kernel = next((p.info["kernel"] for p in plans), "gram")
    if "dmuon" in ms:
        entry["kernel"] = kernel
        for key, peer in RATIOS.items():
            if peer in ms:
                entry[key] = ms["dmuon"] / ms[peer]
        entry["tflops_symmetric"] = symmetric_flops(m, n, kernel) / ms["dmuon"] / 1e9
        entry["share_of_peak"] = entry["tflops_symmetric"] / results.data["peak"]["tflops"]
        entry["torch_tflops_full"] = full_flops(m, n) / ms.get("torch compiled", ms["torch eager"]) / 1e9
    for plan in plans:
        plan.close()
    return entry


def host_time(backend: Backend) -> dict[str, float]:
    """What the host spends on launching 50 matrices, small ones, so that the device never holds it up."""
    matrices, m, n = 50, 256, 512
    x, g, w, o = (torch.randn(m, n, device="cuda") for _ in range(4))
    square_sum = torch.zeros(1, dtype=torch.float64, device="cuda")
    to = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    gradients = [torch.randn(m, n, device="cuda").bfloat16() for _ in range(2)]
    plan = backend.plan(m, n, FP16, measure=False)
    torch.cuda.synchronize()
    best: dict[str, float] = {}

    def clock(name: str, run) -> None:
        for _ in range(5):
            backend.synchronize()
            start = time.perf_counter()
            for _ in range(matrices):
                run()
            best[name] = min(best.get(name, 1e9), (time.perf_counter() - start) * 1e3)
            backend.synchronize()

    def everything() -> None:
        backend.mean(gradients, 2, g, square_sum)
        backend.lookahead(x, g, o)
        plan.run(o, o)
        backend.commit(x, g, w, o, square_sum)
        backend.publish(w, 2, to)

    clock("50 x nothing (ctypes)", backend.torch_stream.query)
    clock("50 x publish", lambda: backend.publish(w, 2, to))
    clock("50 x newton-schulz", lambda: plan.run(o, o))
    clock("50 x whole step", everything)
    plan.close()
    return best


def main() -> int:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    backend, results = open_part()
    results.put("peak", matmul_peak(torch.float16, 8192, 8192, 8192))  # without it there is nothing to relate to
    results.put("peak bf16", matmul_peak(torch.bfloat16, 8192, 8192, 8192))
    for m in (1024, 2048, 4096):
        results.put(f"matmul {m}^3 fp16", matmul_peak(torch.float16, m, m, m))
    results.put("matmul 1024x1024x4096 fp16", matmul_peak(torch.float16, 1024, 1024, 4096))
    results.put("matmul 1024x4096x1024 fp16", matmul_peak(torch.float16, 1024, 4096, 1024))
    results.attempt("host_ms", lambda: host_time(backend))
    for m, n in SHAPES:
        results.attempt(f"{m}x{n}", lambda m=m, n=n: compete(backend, results, m, n), 15 if m < 8192 else 25)
    return results.code()


if __name__ == "__main__":
    sys.exit(main())
