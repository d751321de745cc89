"""A peer to measure against: Newton-Schulz in the gram form over a symmetric product written in Triton.

Half of the tiles are computed, each is stored twice, tuned over a few shapes of tiles. It stands for the public kernels
of that kind, which are not carried: docs/gpu.md says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": block, "BLOCK_K": 64}, num_warps=warps, num_stages=stages)
    for block, warps, stages in ((128, 8, 3), (128, 4, 4), (128, 8, 4), (64, 4, 4))
]


@triton.jit
def symmetric_tiles(a, b, d, out, m, k, alpha, beta, ADD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """out = alpha A B^T (+ beta D): row-major m x k, known to be symmetric. m % BLOCK == 0, k % BLOCK_K == 0."""
    tile = tl.program_id(0)
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK_K)
    left = a + rows[:, None].to(tl.int64) * k + inner[None, :]
    right = b + cols[:, None].to(tl.int64) * k + inner[None, :]
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for _ in range(0, k, BLOCK_K):
        sums = tl.dot(tl.load(left), tl.trans(tl.load(right)), sums)
        left += BLOCK_K
        right += BLOCK_K
    sums *= alpha
    lower = rows[:, None].to(tl.int64) * m + cols[None, :]
    if ADD:
        sums += beta * tl.load(d + lower).to(tl.float32)
    result = sums.to(out.dtype.element_ty)
    tl.store(out + lower, result)
    tl.store(out + (cols[:, None].to(tl.int64) * m + rows[None, :]), tl.trans(result))


tuned = triton.autotune(configs=CONFIGS, key=["m", "k", "ADD"])(symmetric_tiles)

Product = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", float, float], torch.Tensor]


def symmetric_product(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor | None, alpha: float, beta: float
) -> torch.Tensor:
    """alpha A B^T + beta D, for operands of which that is symmetric."""
    m, k = a.shape
    out = torch.empty(m, m, dtype=a.dtype, device=a.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        tiles = m // meta["BLOCK"]
        return (tiles * (tiles + 1) // 2,)

    tuned[grid](a, b, out if d is None else d, out, m, k, alpha, beta, ADD=d is not None)
    return out


def newton_schulz(
    x: torch.Tensor,
    schedule: Sequence[tuple[float, float, float]],
    restarts: Sequence[int] = (3,),
    product: Product = symmetric_product,
) -> torch.Tensor:
    """In fp16, of a wide x in fp32; the steps of docs/numerics.md."""
    y = (x / (x.norm() + 1e-7)).half()
    for begin, end in zip((0, *restarts), (*restarts, len(schedule)), strict=True):
        r, q = product(y, y, None, 1.0, 0.0), None
        for step in range(begin, end):
            a, b, c = schedule[step]
            z = product(r, r, r, c, b)
            if q is None:
                q = z.clone()
                q.diagonal().add_(a)
            else:
                q = product(q, z, q, 1.0, a)
            if step + 1 < end:
                t = product(r, z, r, 1.0, a)
                r = product(z, t, t, 1.0, a)
        y = q @ y
    return y.float()
