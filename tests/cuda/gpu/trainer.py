"""A PyTorch trainer on the device and a daemon beside it: 20 steps against the float64 reference, in Z2 and Z3.

usage: trainer.py BUNDLE_LIB OUT.json [--device cuda|cpu]

dmuon and the tests' own support are on PYTHONPATH, dmuond and dmuonctl on PATH. One rank: NCCL refuses two on one
device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support import reference
from support.daemon import Daemon
from support.models import batches, close, dedicate, make, projections, weights

STEPS, LR = 20, 0.02
BOUND = 2e-4  # docs/numerics.md, end to end


def reference_run() -> dict[str, np.ndarray]:
    model = make().double()
    states = {
        name: (
            reference.Muon(p.detach().numpy(), lr=LR) if projections(name, p) else reference.AdamW(p.detach().numpy())
        )
        for name, p in model.named_parameters()
    }
    for ids in batches(STEPS):
        model.zero_grad()
        model(ids).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                states[name].step(p.grad.numpy())
                p.copy_(torch.from_numpy(states[name].weight))
    return {name: state.weight for name, state in states.items()}


def train(device: str, z3: bool) -> tuple[dict[str, np.ndarray], float]:
    """The weights after all steps, and the seconds of a late step."""
    import dmuon

    model = make().to(device)
    muon = {"lr": LR, "ns_backend": dmuon.NewtonSchulz("gram", deterministic=True)}
    optimizer = dedicate(model, 1, z3, muon=muon, device=device)
    seconds = []
    for ids in batches(STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(ids.to(device)).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    result = weights(model)
    close(model)
    return result, float(np.median(seconds[STEPS // 2 :]))


def main() -> int:
    from dmuon import _native

    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    programs = Path(shutil.which("dmuond") or sys.exit("no dmuond on PATH")).parent
    expected = reference_run()
    report: dict[str, Any] = {}
    weights_of = {}
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group(
            "nccl" if arguments.device == "cuda" else "gloo", init_method=store, rank=0, world_size=1
        )
        with Daemon(programs, Path(folder) / "sockets", "--backend", arguments.device, "--exit-when-idle") as daemon:
            os.environ["DMUON_ENDPOINT"] = daemon.endpoint
            # As with the package's private daemons: it ends with this process, however that ends.
            attached = _native.Connection.open(daemon.endpoint)
            for z3 in (False, True):
                got, seconds = train(arguments.device, z3)
                worst = max(
                    float(np.linalg.norm(got[name] - value) / np.linalg.norm(value)) for name, value in expected.items()
                )
                weights_of[z3] = got
                report["Z3" if z3 else "Z2"] = {"error": worst, "bound": BOUND, "step_ms": 1e3 * seconds}
            del attached
        dist.destroy_process_group()
    same = all(np.array_equal(weights_of[False][name], weights_of[True][name]) for name in expected)
    report["Z2 and Z3"] = {"same_bits": same}
    arguments.out.write_text(json.dumps(report))
    print(json.dumps(report))
    return 0 if same and all(report[z]["error"] <= BOUND for z in ("Z2", "Z3")) else 1


if __name__ == "__main__":
    sys.exit(main())
