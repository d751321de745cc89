"""The Triton peer of scripts/gpu_check.sh without a GPU: it computes, in Triton's interpreter, and it compiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).resolve().parents[1] / "cuda" / "gpu"

COMPUTES = """
import torch
from accuracy import SCHEDULE, exact
from peer_kernel import newton_schulz, symmetric_tiles

def product(a, b, d, alpha, beta):
    m, k = a.shape
    out = torch.full((m, m), float("nan")).half()
    tiles = m // 64
    symmetric_tiles[(tiles * (tiles + 1) // 2,)](
        a, b, out if d is None else d, out, m, k, alpha, beta, ADD=d is not None, BLOCK=64, BLOCK_K=64)
    return out

torch.manual_seed(0)
a, d = torch.randn(320, 128).half(), torch.randn(320, 320).half()
d = d + d.T
expected = 0.5 * a.double() @ a.double().T - 2 * d.double()
assert ((product(a, a, d, 0.5, -2.0).double() - expected).norm() / expected.norm()).item() < 1e-3
x = torch.randn(192, 512)
expected = exact(x)
error = ((newton_schulz(x, SCHEDULE, product=product).double() - expected).norm() / expected.norm()).item()
assert error < 1e-2, error
"""

COMPILES = """
import peer_kernel, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

signature = dict(a="*fp16", b="*fp16", d="*fp16", out="*fp16", m="i32", k="i32", alpha="fp32", beta="fp32")
signature |= dict.fromkeys(("ADD", "BLOCK", "BLOCK_K"), "constexpr")
for config in peer_kernel.CONFIGS:
    source = ASTSource(
        fn=peer_kernel.symmetric_tiles, signature=signature, constexprs={"ADD": True, **config.kwargs},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(6)})
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in compiled.asm["ptx"], config
    assert compiled.metadata.shared <= 227 * 1024, config
"""


def run(code, **environment):
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_computes_a_symmetric_product_and_newton_schulz():
    run(COMPUTES, TRITON_INTERPRET="1")


def test_it_compiles_for_hopper_to_its_matrix_instructions(tmp_path):
    run(COMPILES, TRITON_CACHE_DIR=str(tmp_path))
