"""Which daemon: the one that is named, the node's, or a private one that lives as long as the job.

The first rank of each node decides and tells the others of its node, so that no two of them decide differently.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dmuon import _programs
from dmuon.errors import DaemonUnavailable

_log = logging.getLogger("dmuon")

START_SECONDS = 20.0
_private: PrivateDaemon | None = None
# Attachments to private daemons, for the life of this process: without any, such a daemon ends.
_kept: dict[str, Any] = {}


def _remove_left_folders() -> None:
    """Folders of private daemons of ours that were killed: nobody holds their lock any more."""
    for folder in Path(tempfile.gettempdir()).glob("dmuon-[0-9]*-*"):
        with contextlib.suppress(OSError):
            # A daemon that only begins has its lock before its sockets.
            if folder.lstat().st_uid != os.geteuid() or not (folder / "control.sock").exists():
                continue
            with open(folder / "dmuond.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


class PrivateDaemon:
    """A ``dmuond`` of this job. It ends by itself with its last attachment, and removes its folder."""

    def __init__(self) -> None:
        program = _programs.find("dmuond")
        if program is None:
            raise DaemonUnavailable("no dmuond is installed beside the package dmuon or on PATH")
        _remove_left_folders()
        self.directory = os.path.join(tempfile.gettempdir(), f"dmuon-{os.getpid()}-{secrets.token_hex(4)}")
        ready, child_end = os.pipe()
        try:
            # Its own process session: Ctrl-C in the terminal reaches it only through its trainers.
            self.process = subprocess.Popen(
                [program, "--socket-dir", self.directory, "--socket-mode", "0700", "--exit-when-idle",
                 "--ready-fd", str(child_end), "--log-level", "warning"],
                pass_fds=[child_end],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            os.close(child_end)
            self._wait_ready(ready)
        finally:
            os.close(ready)

    def _wait_ready(self, fd: int) -> None:
        readable, _, _ = select.select([fd], [], [], START_SECONDS)
        if readable and os.read(fd, 64):
            return
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self.process.kill()
        code = self.process.wait()
        why = f"ended with exit code {code}" if readable else f"was not ready after {START_SECONDS:.0f} s"
        raise DaemonUnavailable(f"a private dmuond was started and {why}; its messages are above")

    def alive(self) -> bool:
        return self.process.poll() is None


def _decide() -> tuple[str, bool]:
    """The endpoint, and whether it is a private daemon's."""
    global _private
    from dmuon import _native

    found = _native.default_endpoint()
    if found is not None:
        return found, False
    how = (
        "start one with `dmuond --socket-dir DIR` and set DMUON_ENDPOINT=DIR, or `systemctl start dmuond` for the "
        "whole machine"
    )
    if os.environ.get("DMUON_AUTOSTART", "1") == "0":
        raise DaemonUnavailable(
            "no dmuond: DMUON_ENDPOINT is not set, /run/dmuon has none, and DMUON_AUTOSTART=0 forbids a private one; "
            + how
        )
    if _private is None or not _private.alive():
        try:
            _private = PrivateDaemon()
        except (DaemonUnavailable, OSError) as error:
            raise DaemonUnavailable(f"no dmuond: {error}; {how}") from error
        _log.warning(
            "no dmuond found: started a private one for this job (pid %d, sockets in %s)",
            _private.process.pid, _private.directory,
        )
    return _private.directory, True


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def connect(group: dist.ProcessGroup | None) -> Any:
    """A ``_native.Connection`` to this rank's daemon. Collective."""
    from dmuon import _native

    endpoint, private = _agree(group)
    connection, failure = _kept.get(endpoint), None
    if connection is None:
        try:
            connection = _native.Connection.open(endpoint)
        except Exception as error:
            failure = error
    if group is not None:
        # Else the other ranks would wait in the session for one that does not come.
        failures: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, failure, group=group)
        failure = failure or next((f for f in failures if f is not None), None)
    if failure is not None:
        raise failure
    if private:
        _kept[endpoint] = connection
    return connection


def _agree(group: dist.ProcessGroup | None) -> tuple[str, bool]:
    """Collective; an error of the deciding rank is raised on all ranks of its node."""
    if group is None:
        return _decide()
    node = (socket.gethostname(), _boot_id())
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    nodes: list[Any] = [None] * size
    dist.all_gather_object(nodes, node, group=group)
    leader = nodes.index(node)
    answer: tuple[tuple[str, bool] | None, Exception | None] = (None, None)
    if rank == leader:
        try:
            answer = (_decide(), None)
        except Exception as error:
            answer = (None, error)
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, answer, group=group)
    decided, failure = answers[leader]
    if failure is not None:
        raise failure
    failed = next((e for _, e in answers if e is not None), None)
    if failed is not None:
        raise DaemonUnavailable(f"another node of the job has no daemon: {failed}")
    return decided
