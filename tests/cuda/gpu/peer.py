"""Newton-Schulz beside the Triton peer (peer_kernel.py), in turn in one run."""

from __future__ import annotations

import sys

import torch
from accuracy import SCHEDULE, exact
from goals import SHAPES
from probe import FP16, Backend, open_part
from timing import Contender, in_turn


def peer_of(x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, float]:
    """The peer as a graph, tuned and compiled, and its relative error."""
    from peer_kernel import newton_schulz

    expected = exact(x)
    error = ((newton_schulz(x, SCHEDULE).double() - expected).norm() / expected.norm()).item()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        newton_schulz(x, SCHEDULE)
    return graph, error


def beside(backend: Backend, m: int, n: int) -> dict:
    x = torch.randn(m, n, device="cuda")
    out = torch.empty_like(x)
    try:
        graph, error = peer_of(x)
    except Exception as failure:  # no triton, no C compiler for it
        return {"skipped": f"the peer: {type(failure).__name__}: {failure}"[:500]}
    plan = backend.plan(m, n, FP16)
    peer = Contender("peer", torch.cuda.current_stream(), graph.replay)
    ms, _ = in_turn([peer, Contender("dmuon", backend.torch_stream, lambda: plan.run(x, out))], m)
    plan.close()
    return {"ms": ms, "over_peer": ms["dmuon"] / ms["peer"], "peer_error": error}


def main() -> int:
    torch.manual_seed(0)
    backend, results = open_part()
    results.put("peer", "gram form in fp16 over a symmetric product in Triton (peer_kernel.py), in a CUDA graph")
    for m, n in SHAPES:
        results.attempt(f"{m}x{n}", lambda m=m, n=n: beside(backend, m, n), 10)
    return results.code()


if __name__ == "__main__":
    sys.exit(main())
