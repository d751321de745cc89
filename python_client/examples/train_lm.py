"""Trains a small Llama-style language model on the texts that this machine has, byte by byte.

    torchrun --standalone --nproc-per-node 2 python_client/examples/train_lm.py --optimizer muon
    torchrun --standalone --nproc-per-node 2 python_client/examples/train_lm.py --optimizer adamw

Both optimizers see the same model, data, seed and schedule. With ``muon``, every projection matrix is updated by the
daemon and the rest by AdamW in this process; with ``adamw``, everything by AdamW. ``--results FILE`` keeps the figures
as JSON, for scripts/demo_report.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import pydoc_data.topics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import dmuon

WIDTH, DEPTH, HEADS, HIDDEN, CONTEXT, BATCH = 192, 4, 6, 512, 128, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        half = WIDTH // HEADS // 2
        angle = torch.outer(torch.arange(CONTEXT), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding, over pairs of one head's two halves."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # The residual stream keeps its size whatever the depth.
                nn.init.normal_(p, std=0.02 / (2 * DEPTH) ** 0.5 if "o_proj" in name or "down_proj" in name else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each byte after the first, in nats."""
        x = self.embed_tokens(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def read_texts() -> torch.Tensor:
    """The help texts of Python and, where the system has them, its common licences."""
    texts = [str(pydoc_data.topics.topics[k]) for k in sorted(pydoc_data.topics.topics)]
    licences = pathlib.Path("/usr/share/common-licenses")
    if licences.is_dir():
        files = [p for p in sorted(licences.iterdir()) if p.is_file() and not p.is_symlink()]
        texts += [p.read_text(errors="replace") for p in files]
    return torch.frombuffer(bytearray("\n\n".join(texts).encode()), dtype=torch.uint8)


class Batches:
    """Random windows of the text; the last twentieth is held out."""

    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        text = read_texts()
        cut = len(text) * 19 // 20
        self.train, self.held_out = text[:cut], text[cut:]
        self.rank, self.ranks = rank, ranks
        self.generator = torch.Generator().manual_seed(seed)

    def _windows(self, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        # Every rank draws for all, so that the data do not depend on the number of ranks' generators.
        starts = torch.randint(0, len(text) - CONTEXT - 1, (self.ranks * BATCH,), generator=generator)
        mine = starts[self.rank * BATCH : (self.rank + 1) * BATCH]
        return torch.stack([text[s : s + CONTEXT + 1] for s in mine.tolist()]).long()

    def next(self) -> torch.Tensor:
        return self._windows(self.train, self.generator)

    def evaluation(self, batches: int = 8) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1234)
        return [self._windows(self.held_out, generator) for _ in range(batches)]


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def evaluate(model: nn.Module, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return mean_over_ranks(torch.stack([model(b) for b in batches]).mean())


def schedule(step: int, steps: int) -> float:
    """Warm-up over the first twentieth, then a straight line to a tenth."""
    warm = max(1, steps // 20)
    return min(1.0, (step + 1) / warm) * (1.0 - 0.9 * min(1.0, step / steps))


def build(args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Llama()
    if args.optimizer == "muon":
        dmuon.dedicate_params(
            model, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2, reshard_after_forward=not args.z2
        )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if args.optimizer == "muon":
        return model, dmuon.Muon(model, lr=args.lr, adamw_lr=args.adamw_lr, weight_decay=0.01)
    return model, torch.optim.AdamW(model.parameters(), lr=args.adamw_lr, weight_decay=0.01)


def describe(path: str, job: str) -> None:
    """What dmuonctl shows of this job, into a file."""
    with open(path, "w") as file:
        for command in (["session", job], ["steps", job, "--last", "3"]):
            subprocess.run(["dmuonctl", *command], stdout=file, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    parser.add_argument("--lr", type=float, default=0.02, help="Muon's learning rate (default: %(default)s)")
    parser.add_argument("--adamw-lr", type=float, default=3e-3, help="AdamW's learning rate (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="steps to train (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--z2", action="store_true", help="keep dedicated weights in memory after forward")
    parser.add_argument("--results", help="write the figures to this JSON file")
    parser.add_argument("--describe", metavar="FILE", help="at the end, write what dmuonctl shows of DMUON_JOB")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rank = dist.get_rank()
    batches = Batches(rank, dist.get_world_size(), args.seed)
    held_out = batches.evaluation()
    model, optimizer = build(args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, args.steps))

    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    losses: list[tuple[int, float]] = [(0, evaluate(model, held_out))]
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        batch = batches.next()
        optimizer.zero_grad()
        marks = [time.perf_counter()]
        loss = model(batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        scheduler.step()
        for phase, a, b in zip(seconds, marks, marks[1:], strict=False):
            seconds[phase] += b - a
        if step % args.every == 0 or step == args.steps:
            losses.append((step, evaluate(model, held_out)))
        if rank == 0:
            progress(args, step, losses[-1][1], time.perf_counter() - began)
    if rank == 0 and args.describe:
        describe(args.describe, dmuon.get_comm_ctx(model).job)
    if rank == 0 and args.results:
        figures = {
            "optimizer": args.optimizer,
            "lr": args.lr if args.optimizer == "muon" else args.adamw_lr,
            "losses": losses,
            "seconds_per_step": {k: v / args.steps for k, v in seconds.items()},
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        pathlib.Path(args.results).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def progress(args: argparse.Namespace, step: int, loss: float, elapsed: float) -> None:
    left = elapsed / step * (args.steps - step)
    line = f"{args.optimizer:5}  step {step:4}/{args.steps}  held-out loss {loss:.4f}  {left:4.0f} s left"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if step == args.steps else "", file=sys.stderr, flush=True)
    elif step % args.every == 0 or step == args.steps:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
