"""The training guide's script, as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "python_client" / "examples" / "guide.py"

THE_SCRIPT = """\
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import dmuon
mesh = init_device_mesh(device_type, (dist.get_world_size(),))
assignment = dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2)
for layer in model.layers: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)                       # skips dedicated parameters by itself
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)
for batch in data:
    optimizer.zero_grad(); loss = model(batch).loss; loss.backward(); optimizer.step()
"""


def test_the_script_is_word_for_word_in_it():
    text = GUIDE.read_text().splitlines()
    at = [text.index(line) for line in THE_SCRIPT.splitlines()]
    assert at == sorted(at)


# Z3 is what the script gets; this is the same script in Z2.
IN_Z2 = f"""
import functools, runpy, dmuon
dmuon.dedicate_params = functools.partial(dmuon.dedicate_params, reshard_after_forward=False)
runpy.run_path({str(GUIDE)!r})
"""


def run(daemon, world_size, script):
    environment = {**os.environ, "DMUON_ENDPOINT": daemon.endpoint}
    result = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1", f"--nproc-per-node={world_size}", str(script),
        ],
        env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"^loss (\S+)$", result.stdout, re.M)]
    (digest,) = re.findall(r"^weights (\w+)$", result.stdout, re.M)
    return losses, digest


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_trains_and_z2_and_z3_give_the_same_bits(daemon, world_size, tmp_path):
    losses, digest = run(daemon, world_size, GUIDE)
    assert len(losses) == 10 and losses[-1] < 0.6 * losses[0]
    in_z2 = tmp_path / "in_z2.py"
    in_z2.write_text(IN_Z2)
    assert run(daemon, world_size, in_z2) == (losses, digest)
