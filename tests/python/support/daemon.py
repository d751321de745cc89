"""A real dmuond for tests."""

import json
import os
import subprocess


class Daemon:
    def __init__(self, programs, directory, *options):
        self.endpoint = str(directory)
        self._dmuonctl = str(programs / "dmuonctl")
        ready, child_end = os.pipe()
        self.process = subprocess.Popen(
            [str(programs / "dmuond"), "--socket-dir", self.endpoint, "--ready-fd", str(child_end),
             "--log-level", "warning", *options],
            pass_fds=[child_end], start_new_session=True,
        )  # fmt: skip
        os.close(child_end)
        assert os.read(ready, 16), "dmuond did not start"
        os.close(ready)

    def alive(self):
        return self.process.poll() is None

    def sessions(self):
        """Names of the sessions there are, as dmuonctl tells them."""
        out = subprocess.run(
            [self._dmuonctl, "--endpoint", self.endpoint, "-o", "json", "sessions"],
            capture_output=True, text=True, check=True, timeout=20,
        ).stdout  # fmt: skip
        found = json.loads(out)
        return [s["name"] for s in (found.get("sessions", []) if isinstance(found, dict) else found)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            assert self.process.wait(20) == 0
        finally:
            self.process.kill()
