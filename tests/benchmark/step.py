"""A whole optimizer step of GPT-2-small's matrices on 2 ranks: through the daemon, and the in-process way.

Ours: gradients into the arena, dmuond reduces and updates each matrix once, new weights are back in every rank. The
peer, on the same cores: all-reduce of the gradients by Gloo in buckets, then torch.optim.Muon on each rank, so that
every rank orthogonalises every matrix. Both times are those that a trainer waits, minimum over the steps: other users
of the cores only add to them. Beside them, what being out of process costs: our step over what the daemon computes in
it, called in a loop in one process on as many threads (step_library.cc). All processes have real-time priority where
that is permitted. Memory is what a process holds at the end, shared pages divided among their holders; no step
allocates in the daemon. Prints a table and, as its last line, one JSON object.

    python tests/benchmark/step.py [--layers 12] [--steps 5]
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("DMUON_BUILD", "build/dev")
os.environ["PYTHONPATH"] = str(BUILD / "python")
sys.path.insert(0, os.environ["PYTHONPATH"])

RANKS = 2
# One layer of GPT-2-small: c_attn, attention's c_proj, c_fc, mlp's c_proj, as (out, in).
LAYER = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
BUCKET_BYTES = 25 << 20  # as DistributedDataParallel has them
LR = 0.02
STAGES = ("wait", "reduce", "verdict", "update", "publish", "total")


def matrices(layers):
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * 0.02 for _ in range(layers) for shape in LAYER]


def gradients(layers, rank):
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(shape, generator=generator) for _ in range(layers) for shape in LAYER]


def proportional_set_size(pid="self"):
    """Bytes, with what is shared between processes divided among them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


def begin(rank, store, threads):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    return dist


def timed(dist, step, steps):
    seconds = []
    for _ in range(steps + 1):  # the first is not counted
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def ours(rank, store, layers, steps, endpoint, daemon_pid, threads):
    os.environ["DMUON_ENDPOINT"] = endpoint
    dist = begin(rank, store, threads)
    import dmuon
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    model = nn.Module()
    model.layers = nn.ModuleList(nn.ParameterList() for _ in range(layers))
    for i, values in enumerate(matrices(layers)):
        model.layers[i // len(LAYER)].append(nn.Parameter(values))
    dmuon.dedicate_params(
        model, init_device_mesh("cpu", (RANKS,)), lambda n, p: True, reshard_after_forward=False,
        hook_boundary_resolver=lambda name, p: model.layers[int(name.split(".")[1])],
    )  # fmt: skip
    optimizer = dmuon.Muon(model, lr=LR, record_step_profile=True)
    parameters, given = list(model.parameters()), gradients(layers, rank)

    def step():
        for p, g in zip(parameters, given, strict=True):
            p.grad = g
        optimizer.step()
        dmuon.wait_all_post_step_broadcasts(model)

    seconds = timed(dist, step, steps)
    profile = optimizer.consume_last_step_profile()
    result = {
        "seconds": seconds,
        "ns_calls": profile["ns_matrix_count"],
        "kernel": profile["kernel"],
        "forms": profile["forms"],
        "stages": {stage: profile[f"{stage}_ms"] for stage in STAGES},
        "memory": proportional_set_size(),
        "daemon_memory": proportional_set_size(daemon_pid),
    }
    dist.barrier()
    return result


def peer(rank, store, layers, steps, threads):
    dist = begin(rank, store, threads)
    import torch
    from torch.optim import _muon

    calls = 0
    orthogonalize = _muon._zeropower_via_newtonschulz

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return orthogonalize(*args, **kwargs)

    _muon._zeropower_via_newtonschulz = counted
    parameters = [torch.nn.Parameter(values) for values in matrices(layers)]
    optimizer = torch.optim.Muon(parameters, lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    given = gradients(layers, rank)
    buckets, size = [[]], 0
    for i, g in enumerate(given):
        if size + g.nbytes > BUCKET_BYTES and buckets[-1]:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += g.nbytes

    def step():
        nonlocal calls
        calls = 0
        work = []
        for bucket in buckets:
            flat = torch.cat([given[i].reshape(-1) for i in bucket])
            work.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, handle in work:
            handle.wait()
            flat /= RANKS
            for i, part in zip(bucket, flat.split([given[i].numel() for i in bucket]), strict=True):
                parameters[i].grad = part.view(given[i].shape)
        optimizer.step()

    seconds = timed(dist, step, steps)
    result = {"seconds": seconds, "ns_calls": calls, "memory": proportional_set_size()}
    dist.barrier()
    return result


def same_math(layers, steps, threads):
    """Seconds of what the daemon computes, called in a loop in one process: step_library.cc."""
    library = ctypes.CDLL(str(BUILD / "lib" / "libdmuon_step_bench.so"))
    library.step_same_math.restype = ctypes.c_double
    library.step_error.restype = ctypes.c_char_p
    shapes = LAYER * layers
    numbers = ctypes.c_int64 * len(shapes)
    rows, cols = (numbers(*(shape[i] for shape in shapes)) for i in (0, 1))
    seconds = library.step_same_math(rows, cols, len(shapes), len(LAYER), RANKS, threads, steps)
    assert seconds > 0, library.step_error().decode()
    return seconds


def ahead_of_others():
    """Real-time priority, in turns, for this process and all that it starts, where that is permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    except PermissionError:
        return "normal"
    return "real-time"


def _run(pipe, function, args):
    pipe.send(function(*args))


def on_ranks(function, *args):
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_run, args=(there, function, (rank, f"{folder}/store", *args)))
            process.start()
            there.close()
            workers.append((process, here))
        results = [pipe.recv() for _, pipe in workers]
        for process, _ in workers:
            process.join()
    return results


class Daemon:
    def __init__(self, folder, threads):
        ready, child_end = os.pipe()
        self.endpoint = f"{folder}/run"
        self.process = subprocess.Popen(
            [BUILD / "bin" / "dmuond", "--socket-dir", self.endpoint, "--ready-fd", str(child_end), "--threads",
             str(threads), "--log-level", "warning"],
            pass_fds=[child_end],
        )  # fmt: skip
        os.close(child_end)
        assert os.read(ready, 16), "dmuond did not start"
        os.close(ready)

    def stop(self):
        self.process.terminate()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    count = args.layers * len(LAYER)
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // RANKS))
    priority = ahead_of_others()

    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(folder, cores)
        try:
            mine = on_ranks(
                ours, args.layers, args.steps, daemon.endpoint, daemon.process.pid, max(1, cores // RANKS)
            )
        finally:
            daemon.stop()
    theirs = on_ranks(peer, args.layers, args.steps, max(1, cores // RANKS))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        math = pool.apply(same_math, (args.layers, args.steps, cores))

    our_seconds = max(r["seconds"] for r in mine)
    their_seconds = max(r["seconds"] for r in theirs)
    ns_ours, ns_peer = mine[0]["ns_calls"], theirs[0]["ns_calls"]
    assert ns_ours == ns_peer == count, (ns_ours, ns_peer, count)
    our_memory = mine[0]["daemon_memory"] + sum(r["memory"] for r in mine)
    their_memory = sum(r["memory"] for r in theirs)

    print(f"{count} matrices, {RANKS} ranks, {cores} cores, {priority} priority")
    print(f"ours runs {mine[0]['forms']} on {mine[0]['kernel']}")
    print(f"{'':34}{'dmuon':>12}{'in process':>12}")
    print(f"{'step as the trainer sees it, s':34}{our_seconds:12.3f}{their_seconds:12.3f}")
    print(f"{'the same math in one process, s':34}{math:12.3f}")
    stages = ", ".join(f"{stage} {ms:.0f}" for stage, ms in mine[0]["stages"].items())
    print(f"of dmuon's last step, in the daemon, ms: {stages}")
    print(f"{'Newton-Schulz runs in all':34}{ns_ours:12}{ns_peer * RANKS:12}")
    print(f"{'memory of a trainer, MiB':34}{mine[0]['memory'] >> 20:12}{theirs[0]['memory'] >> 20:12}")
    print(f"{'memory of the daemon, MiB':34}{mine[0]['daemon_memory'] >> 20:12}")
    print(
        json.dumps(
            {
                "step_over_torch": round(our_seconds / their_seconds, 3),
                "out_of_process_tax": round(our_seconds / math, 3),
                "ns_calls_ours": ns_ours,
                "ns_calls_peer_per_rank": ns_peer,
                "memory_over_torch": round(our_memory / their_memory, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
