"""tests/cuda/gpu/trainer.py, which brings a daemon of its own, on the processor."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import BUILD, ROOT


def programs(folder):
    """dmuond and dmuonctl in a folder of their own; this dmuond tells when somebody attaches."""
    folder.mkdir()
    (folder / "dmuonctl").symlink_to(BUILD / "bin/dmuonctl")
    dmuond = folder / "dmuond"
    dmuond.write_text(f'#!/bin/sh\necho "dmuond is $$" >&2\nexec {BUILD}/bin/dmuond "$@" --log-level info\n')
    dmuond.chmod(0o755)
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_daemon_ends_with_it_when_it_is_killed(tmp_path, number):
    path = f"{programs(tmp_path / 'bin')}:{os.environ['PATH']}"
    trainer = subprocess.Popen(
        [sys.executable, ROOT / "tests/cuda/gpu/trainer.py", "unused", tmp_path / "out.json", "--device", "cpu"],
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = ""
        for line in trainer.stderr:
            said += line
            if " attached " in line:
                break
        daemon = os.pidfd_open(int(re.search(r"dmuond is (\d+)", said)[1]))
    finally:
        trainer.send_signal(number)
    assert trainer.wait(30) == -number
    try:
        assert select.select([daemon], [], [], 30)[0], f"the daemon is still there: {said}"
    finally:
        os.close(daemon)
    assert not list(Path(tmp_path).glob("*/sockets")), "its sockets are still there"
