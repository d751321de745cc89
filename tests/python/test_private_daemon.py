"""Which daemon: one that is named, or a private one that lives as long as the job."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = """
import logging, os, sys, traceback, torch, torch.distributed as dist
from support.models import batches, dedicate, make
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
rank, world_size, file = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)
model = make()
try:
    optimizer = dedicate(model, world_size, True)
except Exception:
    traceback.print_exc()
    sys.stderr.flush()
    dist.barrier()  # Gloo may abort a rank whose peer exits first
    os._exit(1)
model(batches(1)[0]).backward()
optimizer.step()
print("stepped", flush=True)
if len(sys.argv) > 2:
    sys.stdin.read()
dist.destroy_process_group()
"""


def launch(world_size, store, *arguments, **environment):
    base = {k: v for k, v in os.environ.items() if not k.startswith("DMUON_ENDPOINT")}
    return [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(store), *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), **environment},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def started_daemons(errors):
    return re.findall(r"started a private one for this job \(pid (\d+), sockets in (\S+)\)", errors)


def wait_gone(pid, folder):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not is_running(pid) and not Path(folder).exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"the private daemon {pid} is still there, or its folder {folder}")


def is_running(pid):
    """A child of a trainer that is gone may stay a zombie where nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def no_node_daemon():
    if Path("/run/dmuon").exists():
        pytest.skip("this machine has a daemon of its own")


def test_the_first_local_rank_starts_one_for_all_and_it_ends_with_them(tmp_path):
    processes = launch(2, tmp_path / "store")
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["stepped\n"] * 2
    (pid, folder), = started_daemons("".join(errors for _, errors in outputs))
    assert outputs[0][1].count("no dmuond found") == 1 and "no dmuond found" not in outputs[1][1]
    wait_gone(int(pid), folder)


def test_the_folder_of_one_that_was_killed_goes_with_the_next_job_and_a_living_ones_stays(tmp_path):
    temporary = {"TMPDIR": str(tmp_path)}
    (killed,) = launch(1, tmp_path / "killed", "stay", **temporary)
    assert killed.stdout.readline() == "stepped\n"
    (left,) = tmp_path.glob("dmuon-*")
    os.kill(int((left / "dmuond.lock").read_text()), signal.SIGKILL)
    killed.communicate(timeout=60)
    assert left.exists()

    (living,) = launch(1, tmp_path / "living", "stay", **temporary)
    assert living.stdout.readline() == "stepped\n"
    (own,) = tmp_path.glob("dmuon-*")
    assert own != left
    pid = int((own / "dmuond.lock").read_text())
    (other,) = launch(1, tmp_path / "other", **temporary)
    assert other.communicate(timeout=120)[0] == "stepped\n"
    assert own.exists()
    living.communicate(timeout=60)
    wait_gone(pid, own)
    assert not any(tmp_path.glob("dmuon-*"))


def test_ctrl_c_ends_trainers_and_the_private_daemon(tmp_path):
    processes = launch(2, tmp_path / "store", "stay")
    for process in processes:
        assert process.stdout.readline() == "stepped\n"
    for process in processes:
        process.send_signal(signal.SIGINT)
    outputs = [process.communicate(timeout=60) for process in processes]
    assert all("KeyboardInterrupt" in errors for _, errors in outputs), outputs
    (pid, folder), = started_daemons(outputs[0][1])
    wait_gone(int(pid), folder)


def test_a_killed_job_leaves_no_private_daemon(tmp_path):
    processes = launch(2, tmp_path / "store", "stay")
    for process in processes:
        assert process.stdout.readline() == "stepped\n"
    for process in processes:
        process.kill()
    (pid, folder), = started_daemons(processes[0].communicate(timeout=20)[1])
    processes[1].communicate(timeout=20)
    wait_gone(int(pid), folder)


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"DMUON_AUTOSTART": "0"}, "DMUON_AUTOSTART=0 forbids a private one; start one with `dmuond --socket-dir"),
        ({"DMUON_ENDPOINT": "/nonexistent/dmuon"}, "no daemon answers at /nonexistent/dmuon/attach.sock"),
    ],
)
def test_without_a_daemon_all_ranks_get_the_same_clear_error(tmp_path, environment, message):
    processes = launch(2, tmp_path / "store", **environment)
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [p.returncode for p in processes] == [1, 1], outputs
    for _, errors in outputs:
        assert message in errors and "DaemonUnavailable" in errors
        assert not started_daemons(errors)


def test_sockets_that_are_not_permitted_are_an_error(tmp_path):
    import dmuon
    from dmuon import _native

    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "attach.sock").touch(mode=0)
    with pytest.raises((PermissionError, dmuon.DaemonUnavailable)) as caught:
        _native.Connection.open(str(folder))
    assert str(folder) in str(caught.value)
