"""`pip install ./python_client` into a clean environment."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conftest import BUILD, ROOT
from test_package import OURS, THEIRS

TRAIN = """
import dmuon, os, sys, torch.distributed as dist
assert "/installed/" in dmuon.__file__, dmuon.__file__
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
from support.models import batches, dedicate, make
model = make()
optimizer = dedicate(model, 1, True)
model(batches(1)[0]).backward()
optimizer.step()
ENDPOINT, ORDER = dmuon.endpoint._private.directory, "installed"
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new venv with the package, and with torch, grpcio and protobuf of this one. The build folder is reused."""
    folder = tmp_path_factory.mktemp("install")
    cache = (BUILD / "CMakeCache.txt").read_text()
    (tests,) = re.findall(r"^DMUON_TESTS:BOOL=(\w+)$", cache, re.M)
    target = folder / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", target,
         "--config-settings", f"build-dir={BUILD}", "--config-settings", f"cmake.define.DMUON_TESTS={tests}",
         ROOT / "python_client"],
        check=True, timeout=600,
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=60)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"{target}\n{sysconfig.get_path('purelib')}\n")
    return folder


def run(environment, code, *arguments):
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DMUON_ENDPOINT")}
    return subprocess.run(
        [environment / "venv" / "bin" / "python", "-c", code, *map(str, arguments)], capture_output=True, text=True,
        timeout=120, env={**inherited, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip


@pytest.mark.skipif(Path("/run/dmuon").exists(), reason="this machine has a daemon of its own")
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_it_trains_with_a_private_daemon_beside_grpcio_and_protobuf(environment, order, tmp_path):
    calls = "ours(); theirs()\n" if order == "ours first" else "theirs(); ours()\n"
    code = THEIRS + TRAIN + OURS if order == "theirs first" else TRAIN + OURS + THEIRS
    result = run(environment, code + calls, tmp_path / "store")
    assert result.returncode == 0, result.stderr
    assert "started a private one" in result.stderr


@pytest.mark.parametrize("name", ["dmuond", "dmuonctl"])
def test_the_programs_come_with_it(environment, name):
    program = environment / "installed" / "bin" / name
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=20)
    assert re.search(r"\d+\.\d+\.\d+", result.stdout)
