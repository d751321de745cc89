"""Gloo's threads at the end of the process."""

from __future__ import annotations

import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


def wait_idle(timeout: float = 1.0) -> None:
    """Returns when no thread of Gloo in this process is at work, or after `timeout` seconds.

    A rank goes on as soon as a collective is done. Gloo's thread then still holds its tensors, and takes the GIL to let
    go of them. If the interpreter has begun to end by then, the process aborts with "terminate called without an active
    exception" (https://github.com/pytorch/pytorch/pull/179291), and a job that has done its work counts as failed.
    ``dist.destroy_process_group()`` does not help while a mesh or a module of FSDP2 holds the group.
    """
    deadline = time.monotonic() + timeout
    while True:
        time.sleep(0.001)  # without the GIL: a thread that waits for it has it and goes on
        if not _any_running() or time.monotonic() > deadline:
            return


def _any_running() -> bool:
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:  # no /proc
        return False
    return any(_is_running(task) for task in tasks)


def _is_running(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name == "pt_gloo_runloop" and rest.split()[0] == "R"
