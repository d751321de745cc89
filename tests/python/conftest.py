"""The package under test is the one in the build folder: build/dev, or the folder that DMUON_BUILD names.

With DMUON_TEST_BACKEND=cuda, ranks and daemon are on the stand-ins for CUDA's libraries, which such a build has.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = (ROOT / os.environ.get("DMUON_BUILD", "build/dev")).resolve()
os.environ["PYTHONPATH"] = os.pathsep.join([str(BUILD / "python"), str(Path(__file__).parent)])
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DMUOND_CALIBRATION_FILE"] = ""  # the bits of a test do not depend on what this machine measured
# A shell that starts the tests in the background ignores SIGINT for them, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
BACKEND = os.environ.get("DMUON_TEST_BACKEND", "cpu")
if BACKEND == "cuda":
    FAKES = BUILD / "fakes"
    if not (FAKES / "libcudart.so.13").exists():
        pytest.exit(f"no stand-ins for CUDA in {FAKES}: set DMUON_BUILD=build/cuda, and build cuda_fake_tests", 1)
    os.environ["LD_LIBRARY_PATH"] = str(FAKES)
    os.environ["LD_PRELOAD"] = str(FAKES / "libcudart.so.13")  # PyTorch's own would be found before
for name in ("DMUON_ENDPOINT", "DMUON_JOB", "DMUON_AUTOSTART", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(name, None)
sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)

from support.daemon import Daemon  # noqa: E402
from support.ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def daemon(tmp_path_factory):
    """One dmuond for all tests: they are jobs that must not disturb each other."""
    with Daemon(BUILD / "bin", tmp_path_factory.mktemp("daemon") / "s", "--backend", BACKEND) as d:
        yield d
        assert d.alive(), "a test ended the daemon that all share"


@pytest.fixture
def daemon_on_the_cpu(tmp_path):
    with Daemon(BUILD / "bin", tmp_path / "cpu", "--backend", "cpu") as d:
        yield d


class Pools:
    """Pools of rank processes by world size. Starting one takes seconds, so they live as long as the tests."""

    def __init__(self, endpoint):
        self._endpoint = endpoint
        self._pools = {}

    def __call__(self, world_size, function, *args, timeout=90, **kwargs):
        """Runs `function(rank, world_size, *args, **kwargs)` on each rank; answers with the list of results."""
        pool = self._pools.get(world_size)
        if pool is None or not pool.alive():
            pool = self._pools[world_size] = Ranks(world_size, self._endpoint)
        return pool.run(function, *args, timeout=timeout, **kwargs)

    def close(self):
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def ranks(daemon):
    pools = Pools(daemon.endpoint)
    yield pools
    pools.close()
